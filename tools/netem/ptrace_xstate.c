// SPDX-License-Identifier: Apache-2.0
// For User-mode Linux 6.1 on processors whose extended state is larger than what it knows (AMX): it saves the state of its processes
// into a buffer of 2,696 bytes (x87 to AVX-512), and the kernel takes back only the whole of it. What the buffer lacks is taken from
// the process itself. Loaded with LD_PRELOAD; User-mode Linux uses ptrace from one thread.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/uio.h>

enum { GETREGSET = 0x4204, SETREGSET = 0x4205, X86_XSTATE = 0x202 };

long ptrace(int request, ...)
{
	static long (*real)(int, int, void *, void *);
	static char state[1 << 16] __attribute__((aligned(64)));
	va_list arguments;
	va_start(arguments, request);
	int pid = va_arg(arguments, int);
	void *address = va_arg(arguments, void *);
	void *data = va_arg(arguments, void *);
	va_end(arguments);

	if (!real)
		real = dlsym(RTLD_NEXT, "ptrace");
	if (!real) {
		errno = ENOSYS;
		return -1;
	}
	if (request != SETREGSET || (long)address != X86_XSTATE)
		return real(request, pid, address, data);

	const struct iovec *known = data;
	struct iovec whole = { state, sizeof(state) };
	if (real(GETREGSET, pid, address, &whole))
		return -1;
	memcpy(state, known->iov_base, known->iov_len < whole.iov_len ? known->iov_len : whole.iov_len);
	return real(SETREGSET, pid, address, &whole);
}
