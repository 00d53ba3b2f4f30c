#!/bin/sh
# Builds the QEMU below /build/qemu inside the build root. Argument: the number of jobs.
# Prints ninja's lines on standard output, and leaves the program in /build/out.
set -e
exec 2>&1
export PATH=/usr/sbin:/usr/bin HOME=/tmp LC_ALL=C
rm -rf /build/obj /build/out
mkdir -p /build/obj /build/out
cd /build/obj
../qemu/configure --cc=gcc --cxx=g++ --host-cc=gcc --prefix=/usr --libdir=lib/x86_64-linux-gnu \
  --target-list=x86_64-softmmu --without-default-features --without-default-devices \
  --with-devices-x86_64=lab --enable-virtfs --enable-attr --enable-cap-ng --enable-slirp \
  --enable-fdt=system --enable-pixman --disable-kvm --disable-docs --disable-install-blobs --disable-debug-info
ninja -j"$1" qemu-system-x86_64
strip -o /build/out/qemu-system-x86_64 qemu-system-x86_64
