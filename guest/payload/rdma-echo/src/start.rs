//! From the monitor's entry in ring 0 to the program in ring 3.
//!
//! The program stays in ring 3: some hosts run ring 0 of a guest by emulation. Ring 0 executes some thirty instructions. They load page tables
//! that ring 3 may use (4 GiB, mapped one to one) and segments of ring 3, and enter it with I/O privilege level 3, for the console's ports.
//! There are no interrupts. Any exception ends the VM, since there is no handler.

#![allow(unsafe_code)] // Entry is assembly.

use core::arch::global_asm;

/// Entries of a page table.
const ENTRIES: usize = 512;
/// Bytes of the stack.
const STACK_BYTES: usize = 64 << 10;

const PRESENT_WRITABLE_USER: u64 = 7;
const LARGE: u64 = 1 << 7;
const LARGE_PAGE_BYTES: u64 = 2 << 20;

#[repr(C, align(4096))]
struct Table([u64; ENTRIES]);

/// Page directories that map the first 4 GiB one to one.
#[repr(C, align(4096))]
struct Directories([u64; 4 * ENTRIES]);

#[unsafe(no_mangle)]
static mut PAGE_MAP: Table = Table([0; ENTRIES]);
#[unsafe(no_mangle)]
static mut PAGE_POINTERS: Table = Table([0; ENTRIES]);
#[unsafe(no_mangle)]
static mut PAGE_DIRECTORIES: Directories = directories();

const fn directories() -> Directories {
    let mut entries = [0; 4 * ENTRIES];
    let mut index = 0;
    while index < entries.len() {
        entries[index] = (index as u64 * LARGE_PAGE_BYTES) | PRESENT_WRITABLE_USER | LARGE;
        index += 1;
    }
    Directories(entries)
}

#[repr(C, align(16))]
struct Stack([u8; STACK_BYTES]);

static mut STACK: Stack = Stack([0; STACK_BYTES]);

/// Bytes of a task state segment without its I/O permission map.
const TASK_STATE_BYTES: u16 = 104;
const TASK_STATE_WORDS: usize = TASK_STATE_BYTES as usize / 2;
/// Bytes of the map of all ports.
const PORT_MAP_BYTES: usize = 8 << 10;

/// A task state segment that permits ring 3 every port, also where ring 3's I/O privilege level is ignored. A byte of ones ends the map.
#[repr(C, align(4096))]
struct TaskState {
    state: [u16; TASK_STATE_WORDS],
    ports: [u8; PORT_MAP_BYTES],
    end: u8,
}

const TASK_STATE_LIMIT: usize = TASK_STATE_BYTES as usize + PORT_MAP_BYTES;

static mut TASK_STATE: TaskState = TaskState {
    state: {
        let mut state = [0; TASK_STATE_WORDS];
        // Offset of the map.
        state[TASK_STATE_WORDS - 1] = TASK_STATE_BYTES;
        state
    },
    ports: [0; PORT_MAP_BYTES],
    end: 0xff,
};

/// Null, then code and data of ring 0 with the monitor's selectors, 0x10 and 0x18. Then data and code of ring 3, and the task state segment.
/// The entry code fills in its base.
static mut SEGMENTS: [u64; 8] = [
    0,
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x00cf_f300_0000_ffff,
    0x00af_fb00_0000_ffff,
    0x0000_8900_0000_0000 | TASK_STATE_LIMIT as u64,
    0,
];

/// Operand of LGDT.
#[repr(C, packed)]
struct TableRegister {
    limit: u16,
    base: *const [u64; 8],
}

// SAFETY: only the entry code uses it.
unsafe impl Sync for TableRegister {}

static SEGMENT_REGISTER: TableRegister = TableRegister { limit: 8 * 8 - 1, base: &raw const SEGMENTS };

// CR4 gets OSFXSR and OSXMMEXCPT for SSE.
global_asm!(
    ".section .text.start, \"ax\"",
    ".globl _start",
    "_start:",
    "lea rax, [{pointers} + 7]",
    "mov [{map}], rax",
    "lea rax, [{directories} + 7]",
    "mov [{pointers}], rax",
    "add rax, 0x1000",
    "mov [{pointers} + 8], rax",
    "add rax, 0x1000",
    "mov [{pointers} + 16], rax",
    "add rax, 0x1000",
    "mov [{pointers} + 24], rax",
    "mov rax, cr4",
    "or rax, 0x600",
    "mov cr4, rax",
    "lea rax, [{map}]",
    "mov cr3, rax",
    "lea rax, [{task}]",
    "mov [{segments} + 6 * 8 + 2], ax",
    "shr rax, 16",
    "mov [{segments} + 6 * 8 + 4], al",
    "mov [{segments} + 6 * 8 + 7], ah",
    "lgdt [{register}]",
    "mov eax, 6 * 8",
    "ltr ax",
    "lea rsp, [{stack} + {stack_bytes}]",
    "push 0x23",
    "lea rax, [{stack} + {stack_bytes}]",
    "push rax",
    "push 0x3002",
    "push 0x2b",
    "lea rax, [2f]",
    "push rax",
    "iretq",
    "2:",
    "xor ebp, ebp",
    "call {main}",
    "ud2",
    ".text",
    map = sym PAGE_MAP,
    pointers = sym PAGE_POINTERS,
    directories = sym PAGE_DIRECTORIES,
    segments = sym SEGMENTS,
    register = sym SEGMENT_REGISTER,
    task = sym TASK_STATE,
    stack = sym STACK,
    stack_bytes = const STACK_BYTES,
    main = sym crate::main,
);
