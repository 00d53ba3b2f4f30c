//! Merges file and flags. Flags override the file; disks and networks are appended.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{anyhow, bail};
use monitor::description::{self, Invalid, OneOrMany, Positions, VmDescription, written};

use crate::cli::RunArgs;

/// Returns the description from file and flags. An error names the file's line, or the flag.
pub fn describe(mut args: RunArgs) -> anyhow::Result<VmDescription> {
    let words = std::mem::take(&mut args.words);
    let (mut vm, positions) = match (&args.payload, words.as_slice()) {
        (Some(_), _) | (None, []) => (written::Vm::default(), None),
        (None, [file]) => {
            let (vm, positions) = description::read(Path::new(file))?;
            (vm, Some(positions))
        }
        (None, [_, other, ..]) => {
            let other = other.to_string_lossy();
            bail!("One VM description can be run at a time; \"{}\" is too many", other.escape_debug());
        }
    };
    if let Some(program) = args.payload.take() {
        let arguments = words
            .into_iter()
            .map(|word| {
                word.into_string()
                    .map_err(|word| anyhow!("The argument {word:?} of the payload is not UTF-8 text"))
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        vm.payload = Some(written::Payload { program, arguments });
    }
    let in_file = Counts::of(&vm);
    let set = merge(&mut vm, args);
    vm.name.get_or_insert_with(|| format!("vm-{}", std::process::id()));
    description::validate(&vm).map_err(|invalid| locate(invalid, positions.as_ref(), &set, &in_file))
}

/// Number of list items from the file.
struct Counts {
    disks: usize,
    net: usize,
    nic: usize,
    rdma: usize,
    vfio_user: usize,
}

impl Counts {
    fn of(vm: &written::Vm) -> Self {
        Self {
            disks: vm.disks.as_ref().map_or(0, Vec::len),
            net: vm.net.as_ref().map_or(0, Vec::len),
            nic: vm.nic.as_ref().map_or(0, Vec::len),
            rdma: vm.rdma.as_ref().map_or(0, Vec::len),
            vfio_user: vm.vfio_user.as_ref().map_or(0, Vec::len),
        }
    }
}

/// Applies the flags; returns the keys that they set.
fn merge(vm: &mut written::Vm, args: RunArgs) -> BTreeSet<&'static str> {
    let mut set = BTreeSet::new();
    macro_rules! take {
        ($($field:ident),*) => {
            $(if args.$field.is_some() {
                vm.$field = args.$field;
                set.insert(stringify!($field));
            })*
        };
    }
    take!(name, kernel, cmdline, protocol, cpus, pin, memory, hugepages, rng, vsock, console, api_socket);
    take!(console_limit, interrupts, sandbox, on_reboot);
    if !args.initrd.is_empty() {
        vm.initrd = Some(OneOrMany(args.initrd));
        set.insert("initrd");
    }
    if !args.disk.is_empty() {
        vm.disks.get_or_insert_default().extend(args.disk);
    }
    if !args.net.is_empty() {
        vm.net.get_or_insert_default().extend(args.net);
    }
    if !args.nic.is_empty() {
        vm.nic.get_or_insert_default().extend(args.nic);
    }
    if !args.rdma.is_empty() {
        vm.rdma.get_or_insert_default().extend(args.rdma);
    }
    if !args.vfio_user.is_empty() {
        vm.vfio_user.get_or_insert_default().extend(args.vfio_user);
    }
    set
}

/// Adds the place of a wrong value to an error.
fn locate(
    invalid: Invalid,
    positions: Option<&Positions>,
    set: &BTreeSet<&'static str>,
    in_file: &Counts,
) -> anyhow::Error {
    let key = invalid.key.first();
    let from_file = |count: usize| invalid.key.first_index().is_some_and(|index| index < count);
    let by_flag = match key {
        "disks" => !from_file(in_file.disks),
        "net" => !from_file(in_file.net),
        "nic" => !from_file(in_file.nic),
        "rdma" => !from_file(in_file.rdma),
        "vfio-user" => !from_file(in_file.vfio_user),
        key => set.contains(key),
    };
    match positions {
        Some(positions) if !by_flag => positions.invalid(invalid).into(),
        _ => {
            let flag = match key {
                "disks" => "disk".to_owned(),
                key => key.replace('_', "-"),
            };
            // `--memory: 1M is not possible` is complete. For a list, the error names the item.
            if invalid.key.to_string() == key {
                return anyhow!("--{flag}: {}", invalid.problem);
            }
            anyhow!("--{flag}, {}: {}", invalid.key, invalid.problem)
        }
    }
}
