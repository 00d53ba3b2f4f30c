//! Symbols that the compiler expects at link time, normally from the C library.

#![allow(unsafe_code)]
// The C memory functions work on raw pointers.
// In assembly, as written in Rust the compiler would turn their loops into calls of themselves. Absent from
// this crate's own build for unit tests, which has the C library.
#![cfg(not(test))]

use core::arch::naked_asm;

/// C `memcpy`.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn memcpy(target: *mut u8, source: *const u8, length: usize) -> *mut u8 {
    naked_asm!("mov rax, rdi", "mov rcx, rdx", "rep movsb", "ret")
}

/// C `memmove`.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn memmove(target: *mut u8, source: *const u8, length: usize) -> *mut u8 {
    naked_asm!(
        "mov rax, rdi",
        "mov rcx, rdx",
        "mov rdx, rdi",
        "sub rdx, rsi",
        "cmp rdx, rcx",
        "jb 2f", // the target begins inside the source: backwards
        "rep movsb",
        "ret",
        "2:",
        "lea rdi, [rdi + rcx - 1]",
        "lea rsi, [rsi + rcx - 1]",
        "std",
        "rep movsb",
        "cld",
        "ret"
    )
}

/// C `memset`.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn memset(target: *mut u8, value: i32, length: usize) -> *mut u8 {
    naked_asm!("mov r8, rdi", "mov eax, esi", "mov rcx, rdx", "rep stosb", "mov rax, r8", "ret")
}

/// C `memcmp`.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, length: usize) -> i32 {
    naked_asm!(
        "xor eax, eax",
        "2:",
        "test rdx, rdx",
        "jz 3f",
        "movzx eax, byte ptr [rdi]",
        "movzx ecx, byte ptr [rsi]",
        "inc rdi",
        "inc rsi",
        "dec rdx",
        "sub eax, ecx",
        "jz 2b",
        "3:",
        "ret"
    )
}

/// LLVM's `bcmp`: zero when equal.
///
/// # Safety
/// As for `memcmp`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, length: usize) -> i32 {
    naked_asm!("jmp {}", sym memcmp)
}

/// C `strlen`.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn strlen(text: *const u8) -> usize {
    naked_asm!(
        "mov rax, rdi",
        "2:",
        "cmp byte ptr [rax], 0",
        "je 3f",
        "inc rax",
        "jmp 2b",
        "3:",
        "sub rax, rdi",
        "ret"
    )
}

/// Named by the unwind tables of the precompiled `core`; never called, as panics abort.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
