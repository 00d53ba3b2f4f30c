//! Memory: huge pages, sharing, locking limits.

use monitor::description::ByteSize;
use rustix::process::Resource;

use super::Finding;
use super::files::Files;

/// Examines the host's memory.
pub fn examine(files: &Files) -> Vec<Finding> {
    vec![
        available(files),
        reserved(files, "huge pages of 2M", 2048),
        reserved(files, "huge pages of 1G", 1_048_576),
        transparent(files),
        transparent_shared(files),
        same_page_merging(files),
        locking(),
    ]
}

fn available(files: &Files) -> Finding {
    let info = files.text("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok()
    };
    match (kib("MemTotal"), kib("MemAvailable")) {
        (Some(total), Some(available)) => {
            Finding::ok("RAM", format!("{} MiB available of {} MiB", available / 1024, total / 1024))
        }
        _ => Finding::limited("RAM", "/proc/meminfo doesn't say", "mount /proc"),
    }
}

fn reserved(files: &Files, name: &'static str, kib: u64) -> Finding {
    let directory = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB");
    let read = |file: &str| files.number(&format!("{directory}/{file}"));
    match (read("nr_hugepages"), read("free_hugepages")) {
        (Some(0), _) => Finding::limited(
            name,
            "none reserved; --hugepages of this size can't be used",
            format!(
                "echo NUMBER > {directory}/nr_hugepages, or hugepagesz= and hugepages= when the host boots"
            ),
        ),
        (Some(all), Some(free)) => Finding::ok(name, format!("{free} free of {all}")),
        _ => {
            Finding::missing(name, "this kernel or CPU has none of this size", "use a kernel with hugetlbfs")
        }
    }
}

fn transparent(files: &Files) -> Finding {
    const NAME: &str = "transparent huge pages";
    const REMEDY: &str = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
    match files.choice("/sys/kernel/mm/transparent_hugepage/enabled") {
        Some(choice) if choice != "never" => Finding::ok(NAME, choice),
        Some(choice) => Finding::limited(NAME, choice, REMEDY),
        None => {
            Finding::limited(NAME, "this kernel has none", "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE")
        }
    }
}

/// Guest RAM is in memfds, to which this second switch applies.
fn transparent_shared(files: &Files) -> Finding {
    const NAME: &str = "the same for guest RAM";
    match files.choice("/sys/kernel/mm/transparent_hugepage/shmem_enabled") {
        Some(choice) if !matches!(choice.as_str(), "never" | "deny") => Finding::ok(NAME, choice),
        Some(choice) => Finding::limited(
            NAME,
            format!("{choice}: guest RAM (a memfd) gets 4K pages"),
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        ),
        None => {
            Finding::limited(NAME, "this kernel doesn't say", "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE")
        }
    }
}

fn same_page_merging(files: &Files) -> Finding {
    const NAME: &str = "same-page merging";
    match files.number("/sys/kernel/mm/ksm/run") {
        None => Finding::ok(NAME, "not in this kernel"),
        Some(1) => Finding::limited(
            NAME,
            "on: costs CPU time, and lets one guest find out by timing what another holds",
            "echo 2 > /sys/kernel/mm/ksm/run",
        ),
        Some(_) => Finding::ok(NAME, "off"),
    }
}

fn locking() -> Finding {
    const NAME: &str = "locked memory";
    let limit = rustix::process::getrlimit(Resource::Memlock);
    match limit.current {
        None => Finding::ok(NAME, "unlimited"),
        Some(bytes) if bytes >= 1 << 30 => Finding::ok(NAME, format!("up to {}", ByteSize(bytes))),
        Some(bytes) => Finding::limited(
            NAME,
            format!("up to {}: too little for devices that guests use directly", ByteSize(bytes)),
            "set memlock to unlimited in /etc/security/limits.d, or LimitMEMLOCK=infinity in the service",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn pages_are_counted_and_an_empty_pool_has_a_remedy() {
        let root = tempfile::tempdir().unwrap();
        let pool = root.path().join("sys/kernel/mm/hugepages/hugepages-2048kB");
        std::fs::create_dir_all(&pool).unwrap();
        std::fs::write(pool.join("nr_hugepages"), "8\n").unwrap();
        std::fs::write(pool.join("free_hugepages"), "5\n").unwrap();
        let files = Files::below(root.path());
        assert_eq!(reserved(&files, "x", 2048).found, "5 free of 8");
        std::fs::write(pool.join("nr_hugepages"), "0\n").unwrap();
        let none = reserved(&files, "x", 2048);
        assert_eq!(none.status, Status::Limited);
        assert!(none.remedy.unwrap().contains("hugepages-2048kB/nr_hugepages"));
        assert_eq!(reserved(&files, "x", 4).status, Status::Missing);
    }

    #[test]
    fn the_choice_in_brackets_counts() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("sys/kernel/mm/transparent_hugepage");
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join("enabled"), "always [madvise] never\n").unwrap();
        std::fs::write(directory.join("shmem_enabled"), "always within_size advise [never] deny force\n")
            .unwrap();
        let files = Files::below(root.path());
        assert_eq!((transparent(&files).status, transparent(&files).found.as_str()), (Status::Ok, "madvise"));
        assert_eq!(transparent_shared(&files).status, Status::Limited);
    }
}
