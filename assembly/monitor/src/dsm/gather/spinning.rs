//! Whether a vCPU spins: runs in a short loop that has a `pause` in it, as whoever waits for somebody is told to write it.
//!
//! Sources: Intel SDM volume 2, `PAUSE`; AMD APM volume 3, the same. A loop that waits without it is taken for work.

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};

/// Bytes of the longest loop that is taken for one that only waits.
pub(super) const LONGEST: usize = 64;

/// Whether the instruction at `rip` is part of such a loop. `bytes` are those from `start` on, and hold [`LONGEST`] on both sides of it as far as they can be read.
pub(super) fn spins(bytes: &[u8], start: u64, rip: u64) -> bool {
    let Some(near) = end_of_loop(bytes, start, rip) else { return false };
    near.iter().any(|(begin, end)| has_pause(bytes, start, *begin, *end))
}

fn decoder(bytes: &[u8], start: u64, from: u64) -> Option<Decoder<'_>> {
    let skip = usize::try_from(from.checked_sub(start)?).ok()?;
    Some(Decoder::with_ip(64, bytes.get(skip..)?, from, DecoderOptions::NONE))
}

/// Loops around `rip`, from the innermost: from where a jump back leads to the jump's end.
fn end_of_loop(bytes: &[u8], start: u64, rip: u64) -> Option<Vec<(u64, u64)>> {
    let longest = LONGEST as u64;
    let mut found = Vec::new();
    let mut one = Instruction::default();
    let mut decoder = decoder(bytes, start, rip)?;
    while decoder.can_decode() {
        decoder.decode_out(&mut one);
        let past = one.next_ip().wrapping_sub(rip);
        if one.code() == Code::INVALID || past > longest {
            break;
        }
        match one.flow_control() {
            FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch => {
                let target = one.near_branch_target();
                if target <= rip && one.next_ip().wrapping_sub(target) <= longest {
                    found.push((target, one.next_ip()));
                }
                if one.flow_control() == FlowControl::UnconditionalBranch {
                    break;
                }
            }
            FlowControl::Next => {}
            // Calls, returns, traps: whoever does that does more than wait.
            _ => break,
        }
    }
    Some(found)
}

fn has_pause(bytes: &[u8], start: u64, begin: u64, end: u64) -> bool {
    let Some(decoder) = decoder(bytes, start, begin) else { return false };
    decoder.into_iter().take_while(|one| one.ip() < end).any(|one| one.mnemonic() == Mnemonic::Pause)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AT: u64 = 0x40_0000;

    /// Which instructions are found to spin.
    fn spinning(code: &[&[u8]]) -> Vec<bool> {
        let bytes = code.concat();
        let decoder = Decoder::with_ip(64, &bytes, AT, DecoderOptions::NONE);
        decoder.into_iter().map(|one| spins(&bytes, AT, one.ip())).collect()
    }

    /// The barrier's loop, as compilers lay it out in either way, spins from its first to its last instruction; what stands around it doesn't.
    #[test]
    fn loops_with_a_pause_spin() {
        let below: &[&[u8]] = &[
            b"\x48\x89\xc1",     // mov rcx, rax
            b"\xf3\x90",         // again: pause
            b"\x8b\x07",         // mov eax, [rdi]
            b"\x39\xf0",         // cmp eax, esi
            b"\x74\xf8",         // je again
            b"\x48\x83\xc1\x08", // add rcx, 8
            b"\xc3",             // ret
        ];
        assert_eq!(spinning(below), [false, true, true, true, true, false, false]);
        let above: &[&[u8]] = &[
            b"\x8b\x07",     // again: mov eax, [rdi]
            b"\x39\xf0",     // cmp eax, esi
            b"\x75\x04",     // jne out
            b"\xf3\x90",     // pause
            b"\xeb\xf6",     // jmp again
            b"\x48\x89\xc8", // out: mov rax, rcx
            b"\xc3",         // ret
        ];
        assert_eq!(spinning(above), [true, true, true, true, true, false, false]);
    }

    /// Loops that work, right before and behind one that spins, work; and so does a long one with a pause somewhere.
    #[test]
    fn loops_that_work_beside_one_that_spins_work() {
        let work: &[&[u8]] = &[
            b"\x48\x03\x07",     // again: add rax, [rdi]
            b"\x48\x83\xc7\x08", // add rdi, 8
            b"\x48\xff\xc9",     // dec rcx
            b"\x75\xf4",         // jne again
        ];
        let spin: &[&[u8]] = &[
            b"\xf3\x90", // again: pause
            b"\x39\x16", // cmp [rsi], edx
            b"\x74\xfa", // je again
        ];
        let spun = [[false; 4].as_slice(), &[true; 3], &[false; 5]].concat();
        assert_eq!(spinning(&[work, spin, work, &[b"\xc3"]].concat()), spun);
        let mut long: Vec<&[u8]> = vec![b"\xf3\x90"];
        long.extend([b"\x48\x03\x07".as_slice(); 30]);
        long.push(b"\x75\xa2");
        assert_eq!(spinning(&long), [false; 32]);
    }

    proptest! {
        /// Whatever the bytes, and wherever they are said to be: an end is reached.
        #[test]
        fn any_bytes_have_an_answer(
            bytes in proptest::collection::vec(any::<u8>(), 0..160),
            start in any::<u64>(),
            rip in any::<u64>(),
            near in any::<bool>(),
        ) {
            let rip = if near { start.wrapping_add(rip % 160) } else { rip };
            spins(&bytes, start, rip);
        }
    }
}
