//! The initial stack of a program: argc, argv, an empty environment, auxv (System V ABI, AMD64 supplement, "Process Initialization").

use payload_abi::{AT_BOOT_INFO, Region};

const AT_NULL: u64 = 0;
const AT_PAGESZ: u64 = 6;
const AT_ENTRY: u64 = 9;

/// The top of a stack: bytes to write at `address`, which is also the initial stack pointer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StackTop {
    /// Address of argc, aligned to 16 bytes.
    pub(super) address: u64,
    /// Bytes from there to the end of the stack.
    pub(super) bytes: Vec<u8>,
}

/// Lays out `arguments` (first the program's name) at the top of `stack`. `None` if they need more than half of it.
pub(super) fn lay_out(stack: Region, arguments: &[String], entry: u64, boot_info: u64) -> Option<StackTop> {
    let end = stack.start.checked_add(stack.size)?;
    let strings: usize = arguments.iter().map(|argument| argument.len() + 1).sum();
    let auxv = [AT_PAGESZ, 4096, AT_ENTRY, entry, AT_BOOT_INFO, boot_info, AT_NULL, 0];
    // argc, argv with its null, the environment's null, auxv.
    let words = 1 + arguments.len() + 1 + 1 + auxv.len();
    let needed = u64::try_from(words.checked_mul(8)?.checked_add(strings)?).ok()?;
    if needed.checked_add(16)? > stack.size / 2 {
        return None;
    }
    let address = (end - needed) & !15;
    let mut text_at = address + words as u64 * 8;
    let mut bytes = Vec::new();
    bytes.extend((arguments.len() as u64).to_le_bytes());
    for argument in arguments {
        bytes.extend(text_at.to_le_bytes());
        text_at += argument.len() as u64 + 1;
    }
    bytes.extend([0; 16]);
    for word in auxv {
        bytes.extend(word.to_le_bytes());
    }
    for argument in arguments {
        bytes.extend(argument.as_bytes());
        bytes.push(0);
    }
    Some(StackTop { address, bytes })
}

#[cfg(test)]
mod tests {
    use super::lay_out;
    use payload_abi::Region;
    use proptest::prelude::*;

    const STACK: Region = Region { start: 0x10_0000, size: 0x1000 };

    proptest! {
        /// The block is aligned, inside its stack, and reads back as a C program would read it.
        #[test]
        fn arguments_read_back(arguments in prop::collection::vec("[a-z ]{0,20}", 0..40)) {
            let top = lay_out(STACK, &arguments, 0x20_0000, 0x5000).unwrap();
            prop_assert_eq!(top.address % 16, 0);
            prop_assert!(top.address >= STACK.start + STACK.size / 2);
            prop_assert!(top.address + top.bytes.len() as u64 <= STACK.start + STACK.size);
            let word = |index: usize| {
                u64::from_le_bytes(top.bytes[index * 8..index * 8 + 8].try_into().unwrap())
            };
            let count = usize::try_from(word(0)).unwrap();
            prop_assert_eq!(count, arguments.len());
            for (index, argument) in arguments.iter().enumerate() {
                let at = usize::try_from(word(1 + index) - top.address).unwrap();
                let text: Vec<u8> = top.bytes[at..].iter().copied().take_while(|byte| *byte != 0).collect();
                prop_assert_eq!(text, argument.as_bytes());
            }
            prop_assert_eq!((word(1 + count), word(2 + count)), (0, 0));
            prop_assert_eq!((word(3 + count), word(4 + count)), (6, 4096));
            prop_assert_eq!(word(8 + count), 0x5000);
        }
    }

    #[test]
    fn too_many_arguments_are_refused() {
        assert_eq!(lay_out(STACK, &["x".repeat(2048)], 0, 0), None);
        assert_eq!(lay_out(STACK, &vec![String::new(); 300], 0, 0), None);
    }
}
