//! KVM's binary statistics: exits that the kernel handled itself, by type.
//!
//! Source: Linux `Documentation/virt/kvm/api.rst`, KVM_GET_STATS_FD. The file holds a header, an id string, descriptors
//! and a block of u64 values.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::sys;

/// Counters of one VM or vCPU by KVM's own names (`exits`, `halt_exits`, `io_exits`, ...). Histograms appear as the sum
/// of their buckets.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelStats {
    /// The values.
    Counters(BTreeMap<String, u64>),
    /// This kernel has no statistics; the text says why.
    Absent(String),
}

/// System calls of a thread that reads statistics ([`crate::vcpu::VcpuManager::kernel_stats`]).
pub const SYSCALLS: &[i64] = &[libc::SYS_pread64];

/// Limit for the number of descriptors and for the bytes of a name. Larger values don't come from KVM.
const MAX_DESCRIPTORS_AND_NAME_BYTES: u32 = 4096;

struct Field {
    name: String,
    offset: u64,
    values: usize,
}

/// Reads the statistics of one VM or vCPU repeatedly; it parses the layout once.
pub(crate) struct StatsReader(Result<(File, Vec<Field>), String>);

impl StatsReader {
    /// Never fails: [`KernelStats::Absent`] reports an error.
    pub(crate) fn open(vm_or_vcpu: &impl AsRawFd) -> Self {
        Self(match sys::stats_fd(vm_or_vcpu) {
            Err(error) => Err(format!("KVM gives no statistics descriptor: {error}")),
            Ok(fd) => {
                let file = File::from(fd);
                read_fields(&file)
                    .map(|fields| (file, fields))
                    .map_err(|error| format!("KVM's statistics can't be read: {error}"))
            }
        })
    }

    pub(crate) fn read(&self) -> KernelStats {
        let (file, fields) = match &self.0 {
            Ok(open) => open,
            Err(reason) => return KernelStats::Absent(reason.clone()),
        };
        let mut counters = BTreeMap::new();
        for field in fields {
            let mut raw = vec![0; field.values * 8];
            if let Err(error) = file.read_exact_at(&mut raw, field.offset) {
                return KernelStats::Absent(format!("KVM's statistic {} can't be read: {error}", field.name));
            }
            let sum = raw.chunks_exact(8).fold(0u64, |sum, raw| {
                sum.wrapping_add(u64::from_ne_bytes(raw.try_into().unwrap_or_default()))
            });
            counters.insert(field.name.clone(), sum);
        }
        KernelStats::Counters(counters)
    }
}

fn word(raw: &[u8], at: usize) -> u32 {
    raw.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

fn read_fields(file: &impl FileExt) -> io::Result<Vec<Field>> {
    // struct kvm_stats_header: flags, name_size, num_desc, id_offset, desc_offset, data_offset.
    let mut header = [0; 24];
    file.read_exact_at(&mut header, 0)?;
    let (name_size, count) = (word(&header, 4), word(&header, 8));
    let (descriptors, data) = (u64::from(word(&header, 16)), u64::from(word(&header, 20)));
    if name_size == 0 || name_size > MAX_DESCRIPTORS_AND_NAME_BYTES || count > MAX_DESCRIPTORS_AND_NAME_BYTES
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("header with {count} descriptors and names of {name_size} bytes"),
        ));
    }
    // struct kvm_stats_desc: flags u32, exponent i16, size u16, offset u32, bucket_size u32, name.
    let size = 16 + name_size as usize;
    let mut raw = vec![0; size * count as usize];
    file.read_exact_at(&mut raw, descriptors)?;
    Ok(raw
        .chunks_exact(size)
        .map(|one| {
            let name = one[16..].split(|b| *b == 0).next().unwrap_or_default();
            Field {
                name: String::from_utf8_lossy(name).into_owned(),
                offset: data + u64::from(word(one, 8)),
                values: usize::from(u16::from_ne_bytes([one[6], one[7]])),
            }
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn descriptors_and_values_are_found_where_the_header_says() {
        let mut raw = Vec::new();
        for word in [0u32, 8, 2, 24, 32, 96] {
            raw.extend(word.to_ne_bytes());
        }
        raw.extend(*b"kvm-1\0\0\0");
        for (name, size, offset) in [(b"exits\0\0\0", 1u16, 0u32), (b"hist\0\0\0\0", 2, 8)] {
            raw.extend(0u32.to_ne_bytes());
            raw.extend(0i16.to_ne_bytes());
            raw.extend(size.to_ne_bytes());
            raw.extend(offset.to_ne_bytes());
            raw.extend(0u32.to_ne_bytes());
            raw.extend(name);
        }
        raw.resize(96, 0);
        for value in [7u64, 40, 2] {
            raw.extend(value.to_ne_bytes());
        }
        let mut file = tempfile();
        file.write_all(&raw).unwrap();
        let fields = read_fields(&file).unwrap();
        let stats = StatsReader(Ok((file, fields))).read();
        let expected = BTreeMap::from([("exits".to_owned(), 7), ("hist".to_owned(), 42)]);
        assert_eq!(stats, KernelStats::Counters(expected));
    }

    #[test]
    fn a_file_that_is_not_statistics_is_an_error() {
        let mut file = tempfile();
        file.write_all(&[0xff; 24]).unwrap();
        assert!(read_fields(&file).is_err());
    }

    fn tempfile() -> File {
        File::from(rustix::fs::memfd_create("stats", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
    }
}
