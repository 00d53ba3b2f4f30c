//! A guest's panic that the emulator is to blame for: an interrupt that KVM injected reached the guest twice (STABILITY.md, "An interrupt that
//! comes twice").
//!
//! QEMU's `VMRUN` leaves the vector of the interrupt that it injects in the CPU's place for pending exceptions. When the CPU's loop is asked to
//! leave before anything else is written there, it takes the vector once more, with interrupts off or not. Where that is the first instruction of the
//! entry from user space, Linux finds a frame of the kernel, keeps the user's GS, and faults on its first per-CPU access, again and again, until the
//! entry's own stack is full. The registers of that double fault are always the same, and are what is looked for here: nothing else that a guest
//! may die of is taken for it.

/// Where x86-64 Linux has the stacks of its entry code.
const ENTRY_AREA: std::ops::Range<u64> = 0xffff_fe00_0000_0000..0xffff_fe80_0000_0000;
/// Bytes of such a stack.
const STACK: u64 = 4096;

/// The number in hexadecimal digits behind `name` in a line of an oops.
fn number(line: &str, name: &str) -> Option<u64> {
    let at = line.find(name)?;
    let before = line[..at].chars().next_back();
    if before.is_some_and(|c| c.is_ascii_alphanumeric()) {
        return None;
    }
    let digits = &line[at + name.len()..];
    let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    u64::from_str_radix(&digits[..end], 16).ok()
}

/// What of such an oops has been seen.
#[derive(Default)]
struct Oops {
    /// The entry's own code was interrupted.
    entry: bool,
    stack: Option<u64>,
    /// GS was the kernel's on both sides of `swapgs`.
    same_gs: bool,
    fault: Option<u64>,
}

impl Oops {
    fn is_it(&self) -> bool {
        let full = |stack: u64| ENTRY_AREA.contains(&stack) && stack.is_multiple_of(STACK);
        self.entry
            && self.same_gs
            && self.stack.is_some_and(full)
            && self.fault == self.stack.and_then(|stack| stack.checked_sub(8))
    }
}

/// The line of a guest's console that shows it, if it is there.
pub fn found(lines: impl Iterator<Item = String>) -> Option<String> {
    let mut oops = Oops::default();
    for line in lines {
        if line.contains("RIP: 0010:") {
            let entry = ["error_entry+", "asm_exc_page_fault+", "exc_page_fault+"];
            oops = Oops {
                entry: entry.iter().any(|name| line.contains(&format!("RIP: 0010:{name}"))),
                ..Oops::default()
            };
        } else if let Some(stack) = number(&line, "RSP: 0000:").or_else(|| number(&line, "RSP: 0018:")) {
            oops.stack = Some(stack);
        } else if let (Some(gs), Some(kernel)) = (number(&line, "GS:"), number(&line, "knlGS:")) {
            oops.same_gs = gs == kernel && gs != 0;
        } else if let Some(fault) = number(&line, "CR2: ") {
            oops.fault = Some(fault);
            if oops.is_it() {
                return Some(line.trim().to_owned());
            }
        }
    }
    None
}

/// Such an oops; QEMU's own monitor gets the same when the second delivery is forced.
#[cfg(test)]
pub(crate) const SEEN: &str = "\
[   41.206300] RIP: 0010:error_entry+0x10/0x130
[   41.206320] Code: 85 0e fd ff ff 0f 01 f8 e9 06 fd ff ff 66 66 2e 0f 1f 84 00 00 00 00 00
[   41.206332] RSP: 0000:fffffe0000002000 EFLAGS: 00000083
[   41.206347] RAX: 000000000001fb80 RBX: fffffe0000002088 RCX: ffffffff81c01220
[   41.206374] FS:  00007fe3bac0a7c0(0000) GS:ffff88801e600000(0000) knlGS:ffff88801e600000
[   41.206381] CS:  0010 DS: 0000 ES: 0000 CR0: 0000000080050033
[   41.206386] CR2: fffffe0000001ff8 CR3: 000000001f12e000 CR4: 0000000000710ef0";

#[cfg(test)]
mod tests {
    use super::{SEEN, found};

    fn says(text: &str) -> bool {
        found(text.lines().map(str::to_owned)).is_some()
    }

    #[test]
    fn the_double_fault_of_a_second_delivery_is_known() {
        assert!(says(SEEN));
        // After others' lines, and after an oops of another kind.
        assert!(says(&format!("LAB-L2 init 3.1\n[ 1.0] RIP: 0010:panic+0x1/0x2\n{SEEN}")));
    }

    /// Whatever differs makes it a failure of the guest's own, or of the monitor's.
    #[test]
    fn other_panics_are_not_taken_for_it() {
        for (from, to) in [
            ("RIP: 0010:error_entry", "RIP: 0010:e1000_clean"),
            ("RIP: 0010:error_entry", "RIP: 0033:error_entry"),
            ("RSP: 0000:fffffe0000002000", "RSP: 0000:fffffe0000002010"),
            ("RSP: 0000:fffffe0000002000", "RSP: 0018:ffffc90000002000"),
            ("CR2: fffffe0000001ff8", "CR2: fffffe0000000ff8"),
            ("CR2: fffffe0000001ff8", "CR2: 0000000000000000"),
            ("knlGS:ffff88801e600000", "knlGS:0000000000000000"),
            (" GS:ffff88801e600000", " GS:0000000000000000"),
        ] {
            let other = SEEN.replace(from, to);
            assert!(other != SEEN && !says(&other), "{to}");
        }
        assert!(!says(""));
        assert!(!says(&SEEN.lines().rev().collect::<Vec<_>>().join("\n")));
    }
}
