//! The lab's edits of QEMU's source. Each edit has the text that it replaces and its number of occurrences. So a
//! release that differs is rejected instead of half edited. docs/decisions/0001-patched-qemu-for-the-lab.md has the
//! reasons.

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;

/// A replacement in one file.
#[derive(Debug, Clone, Copy)]
pub struct Edit {
    /// Path below the source's root.
    pub file: &'static str,
    old: &'static str,
    new: &'static str,
    times: Times,
}

/// Number of occurrences of an edit's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Times {
    Exactly(usize),
    /// Newer releases have the fix.
    OnceOrNever,
}
use Times::{Exactly, OnceOrNever};

const WALKS: &str = "target/i386/tcg/system/excp_helper.c";
const INJECTION: &str = "target/i386/tcg/system/svm_helper.c";

/// All edits, in order.
pub const EDITS: &[Edit] = &[
    Edit {
        file: WALKS,
        old: "static bool ptw_translate(PTETranslate *inout, hwaddr addr)\n{\n    int flags;\n\n    inout->gaddr = addr;\n    flags = probe_access_full_mmu(inout->env, addr, 0, MMU_DATA_STORE,\n",
        new: r#"static bool lab_walks_read;

static void __attribute__((constructor)) lab_choose_walks(void)
{
    const char *walks = getenv("CAUSEWAY_LAB_WALKS");

    lab_walks_read = walks && !strcmp(walks, "read");
}

static bool ptw_probe(PTETranslate *inout, MMUAccessType access_type)
{
    hwaddr addr = inout->gaddr;
    int flags;

    flags = probe_access_full_mmu(inout->env, addr, 0, access_type,
"#,
        times: Exactly(1),
    },
    Edit {
        file: WALKS,
        old: "static inline uint32_t ptw_ldl(",
        new: r#"static bool ptw_translate(PTETranslate *inout, hwaddr addr)
{
    inout->gaddr = addr;
    return ptw_probe(inout, lab_walks_read ? MMU_DATA_LOAD : MMU_DATA_STORE);
}

/* The entry's page was probed for a load: a store needs a probe of its own. */
static bool ptw_probe_set(PTETranslate *inout, uint32_t old, uint32_t set)
{
    return !lab_walks_read || !(set & ~old) ||
           ptw_probe(inout, MMU_DATA_STORE);
}

static inline uint32_t ptw_ldl("#,
        times: Exactly(1),
    },
    Edit {
        file: WALKS,
        old: "if (!ptw_setl(&pte_trans, pte, PG_ACCESSED_MASK)) {",
        new: "if (!ptw_probe_set(&pte_trans, pte, PG_ACCESSED_MASK)) {\n            return false;\n        }\n        if (!ptw_setl(&pte_trans, pte, PG_ACCESSED_MASK)) {",
        times: Exactly(6),
    },
    Edit {
        file: WALKS,
        old: "if (!ptw_setl(&pte_trans, pte, set)) {",
        new: "if (!ptw_probe_set(&pte_trans, pte, set)) {\n            return false;\n        }\n        if (!ptw_setl(&pte_trans, pte, set)) {",
        times: Exactly(1),
    },
    Edit {
        file: INJECTION,
        old: "            do_interrupt_x86_hardirq(env, vector, 1);\n            break;\n",
        new: "            do_interrupt_x86_hardirq(env, vector, 1);\n            lab_after_injection(cs);\n            break;\n",
        times: Exactly(1),
    },
    Edit {
        file: INJECTION,
        old: "void helper_vmrun(CPUX86State *env, int aflag, int next_eip_addend)\n",
        new: r#"static bool lab_keep_vector;
static unsigned lab_force_exit;

static void __attribute__((constructor)) lab_choose_injection(void)
{
    const char *keep = getenv("CAUSEWAY_LAB_KEEP_VECTOR");
    const char *force = getenv("CAUSEWAY_LAB_FORCE_EXIT");

    lab_keep_vector = keep && !strcmp(keep, "1");
    lab_force_exit = force ? strtoul(force, NULL, 10) : 0;
}

/* The interrupt is delivered: its vector must not be taken once more. */
static void lab_after_injection(CPUState *cs)
{
    static unsigned injections;

    if (!lab_keep_vector) {
        cs->exception_index = -1;
    }
    if (lab_force_exit && ++injections % lab_force_exit == 0) {
        cpu_exit(cs);
    }
}

void helper_vmrun(CPUX86State *env, int aflag, int next_eip_addend)
"#,
        times: Exactly(1),
    },
    // QEMU 10.0 changes the word of pending interrupts without the lock that other threads use for it.
    Edit {
        file: INJECTION,
        old: "        cs->interrupt_request |= CPU_INTERRUPT_VIRQ;\n",
        new: "        bql_lock();\n        cs->interrupt_request |= CPU_INTERRUPT_VIRQ;\n        bql_unlock();\n",
        times: OnceOrNever,
    },
    Edit {
        file: INJECTION,
        old: "#include \"qemu/osdep.h\"\n",
        new: "#include \"qemu/osdep.h\"\n#include \"qemu/main-loop.h\"\n",
        times: Exactly(1),
    },
];

impl Edit {
    /// Returns the file's text after the edit.
    fn apply(&self, text: &str) -> Result<String> {
        let found = text.matches(self.old).count();
        let fits = match self.times {
            Exactly(times) => found == times,
            OnceOrNever => found <= 1,
        };
        if !fits {
            let line = self.old.lines().next().unwrap_or_default();
            bail!("{} has {line:?} {found} times, and the edit expects {:?}", self.file, self.times);
        }
        Ok(text.replace(self.old, self.new))
    }
}

/// Applies all edits to the source at `root`.
pub fn apply(root: &Path) -> Result<()> {
    for edit in EDITS {
        let path = root.join(edit.file);
        let text = fs::read_to_string(&path).with_context(|| format!("Can't read {}", path.display()))?;
        fs::write(&path, edit.apply(&text)?).with_context(|| format!("Can't write {}", path.display()))?;
    }
    Ok(())
}

/// Returns the inputs of the edits' recipe.
pub fn recipe() -> impl Iterator<Item = &'static str> {
    EDITS.iter().flat_map(|e| [e.file, e.old, e.new])
}

#[cfg(test)]
mod tests {
    use super::*;

    const EDIT: Edit = Edit { file: "a/b.c", old: "one", new: "two", times: Exactly(2) };

    #[test]
    fn an_edit_replaces_what_it_expects() {
        assert_eq!(EDIT.apply("one and one").unwrap(), "two and two");
    }

    #[test]
    fn another_count_is_an_error_that_names_the_file() {
        for text in ["one", "one one one", ""] {
            assert!(EDIT.apply(text).unwrap_err().to_string().contains("a/b.c"));
        }
    }

    #[test]
    fn a_source_is_edited_once_only() {
        let dir = tempfile::tempdir().unwrap();
        for file in [WALKS, INJECTION] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let of_file = EDITS.iter().filter(|e| e.file == file);
            let times = |e: &Edit| if let Exactly(times) = e.times { times } else { 1 };
            let text: String = of_file.map(|e| e.old.repeat(times(e))).collect();
            fs::write(path, text).unwrap();
        }
        apply(dir.path()).unwrap();
        assert!(apply(dir.path()).is_err());
    }
}
