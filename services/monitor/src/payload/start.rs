//! The state in which vCPUs of a payload VM start: registers, boot information, and stacks with the program's arguments.

use std::sync::Arc;

use machine::interrupt::IrqchipKind;
use machine::kvm::Host;
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestRam};
use machine::vcpu::{StartRegisters, VcpuConfig, VcpuManager, VcpuStart};
use machine::x86::{CpuId, CpuTopology, guest_cpuid, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs, kvm_xcrs};
use payload_abi::{BootInfo, DOORBELL_ADDRESS, DOORBELL_SIZE, MAGIC, Region, VERSION};

use super::arguments::StackTop;
use super::layout::{self, Layout};
use super::whole::{Local, Whole, vcpus_of};
use super::{PayloadError, arguments};

fn to_usize(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

/// The part of a VM that this process has.
pub(super) struct NodePart {
    nodes: u32,
    total: u32,
    vcpus: std::ops::Range<u32>,
}

impl NodePart {
    pub(super) fn of(whole: Option<&dyn Whole>, total: u32) -> Self {
        let (node, nodes) = whole.map_or((0, 1), |whole| (whole.node(), whole.nodes().max(1)));
        Self { nodes, total, vcpus: vcpus_of(node, nodes, total) }
    }

    /// The node of a vCPU.
    fn node_of(&self, index: u32) -> u32 {
        (0..self.nodes).find(|node| vcpus_of(*node, self.nodes, self.total).contains(&index)).unwrap_or(0)
    }
}

/// What the initial state of all vCPUs depends on.
pub(super) struct Start<'a> {
    pub(super) layout: &'a Layout,
    pub(super) part: NodePart,
    /// The program's name, then its arguments.
    pub(super) arguments: Vec<String>,
    /// Address of the program's first instruction.
    pub(super) entry: u64,
    /// Number of vCPUs of the whole VM.
    pub(super) vcpus: u32,
    /// Number of doorbells.
    pub(super) doorbells: u32,
    /// Memory that the program may use as it likes.
    pub(super) free: Region,
}

impl Start<'_> {
    /// The vCPUs of this process.
    pub(super) fn local(&self, whole: Option<Arc<dyn Whole>>, topology: &CpuTopology) -> Local {
        let vcpus = self.part.vcpus.clone().map(|index| (topology.apic_id(index), index)).collect();
        Local { vcpus, whole }
    }

    /// Settings of the vCPUs of this process. `pin` lists CPUs by vCPU.
    pub(super) fn configs(
        &self,
        host: &Host,
        topology: &CpuTopology,
        pin: &[Vec<usize>],
    ) -> Result<Vec<VcpuConfig>, PayloadError> {
        let mut configs = Vec::new();
        for index in self.part.vcpus.clone() {
            let cpuid = guest_cpuid(host, topology, index, IrqchipKind::Kernel)?;
            let registers = start_registers(self.layout, index, self.entry, Features::of(&cpuid));
            configs.push(VcpuConfig {
                id: topology.apic_id(index),
                cpuid,
                tells_tsc_frequency: false,
                start: VcpuStart::Registers(Box::new(registers)),
                // CPUs of another node's host may not exist here.
                pin_to: pin.get(to_usize(index)).cloned().unwrap_or_default(),
            });
        }
        Ok(configs)
    }

    /// Sets registers that new vCPUs don't start with. Returns the TSC's frequency, kHz; 0 if unknown.
    ///
    /// Extended control registers can only be set as part of a whole state. So the state of each new vCPU is saved, completed and restored.
    /// That also yields the TSC frequency.
    pub(super) fn complete_registers(
        &self,
        manager: &VcpuManager,
        topology: &CpuTopology,
        features: &[Features],
    ) -> Result<u64, PayloadError> {
        let mut tsc_khz = 0;
        for ((index, mut saved), features) in self.part.vcpus.clone().zip(manager.save()?).zip(features) {
            if features.xcr0 != 0 {
                let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..kvm_xcrs::default() };
                xcrs.xcrs[0].value = features.xcr0; // register 0, as all is zero
                saved.xcrs = Some(xcrs);
            }
            tsc_khz = saved.tsc_khz.unwrap_or(0).into();
            saved.regs.rsp = self.stack_top(index)?.address;
            saved.regs.rdi = self.layout.boot_info(index);
            manager.set_state(topology.apic_id(index), VcpuStart::Restored(Box::new(saved)))?;
        }
        Ok(tsc_khz)
    }

    /// Writes boot information and stacks of all vCPUs, other nodes' included: shared memory must be equal on all nodes before anything
    /// runs.
    pub(super) fn write_memory(&self, ram: &GuestRam, tsc_khz: u64) -> Result<(), PayloadError> {
        let memory = ram.memory();
        let memory = memory.memory();
        for index in 0..self.vcpus {
            let info = self.boot_info(index, tsc_khz);
            memory.write_slice(&info.to_bytes(), GuestAddress(self.layout.boot_info(index)))?;
            let stack = self.stack_top(index)?;
            memory.write_slice(&stack.bytes, GuestAddress(stack.address))?;
        }
        Ok(())
    }

    fn boot_info(&self, index: u32, tsc_khz: u64) -> BootInfo {
        let mut info = BootInfo {
            magic: MAGIC,
            version: VERSION,
            size: u32::try_from(size_of::<BootInfo>()).unwrap_or(u32::MAX),
            vcpu_count: self.vcpus,
            vcpu_index: index,
            node_count: self.part.nodes,
            node_index: self.part.node_of(index),
            tsc_khz,
            ram_count: u32::try_from(self.layout.ram.len()).unwrap_or(0),
            doorbell_count: self.doorbells,
            free: self.free,
            stack: self.layout.stack(index),
            doorbell: Region { start: DOORBELL_ADDRESS, size: DOORBELL_SIZE },
            window: self.layout.window,
            ..BootInfo::default()
        };
        for (slot, region) in info.ram.iter_mut().zip(&self.layout.ram) {
            *slot = *region;
        }
        info
    }

    fn stack_top(&self, index: u32) -> Result<StackTop, PayloadError> {
        let (stack, boot_info) = (self.layout.stack(index), self.layout.boot_info(index));
        arguments::lay_out(stack, &self.arguments, self.entry, boot_info).ok_or_else(|| {
            PayloadError::TooSmall {
                memory: self.layout.low_end(),
                what: "the arguments, which take more than half a stack".to_owned(),
            }
        })
    }
}

/// Enabled CPU features.
#[derive(Debug, Clone, Copy)]
pub(super) struct Features {
    fsgsbase: bool,
    /// Value of XCR0; 0 without XSAVE.
    xcr0: u64,
}

impl Features {
    /// XCR0 bits: x87, SSE, AVX, and the three components of AVX-512.
    const STATE: u64 = 0xe7;

    /// Those of vCPUs, in order.
    pub(super) fn of_all(configs: &[VcpuConfig]) -> Vec<Self> {
        configs.iter().map(|config| Self::of(&config.cpuid)).collect()
    }

    fn of(cpuid: &CpuId) -> Self {
        let leaf = |function: u32, index: u32| {
            cpuid.as_slice().iter().find(move |entry| entry.function == function && entry.index == index)
        };
        let xsave = leaf(1, 0).is_some_and(|entry| entry.ecx & 1 << 26 != 0);
        let components = leaf(0xd, 0).map_or(0, |entry| u64::from(entry.edx) << 32 | u64::from(entry.eax));
        Self {
            fsgsbase: leaf(7, 0).is_some_and(|entry| entry.ebx & 1 != 0),
            xcr0: if xsave { components & Self::STATE } else { 0 },
        }
    }
}

fn start_registers(layout: &Layout, index: u32, entry: u64, features: Features) -> StartRegisters {
    const CR0_PE_MP_ET_NE_WP_PG: u64 = 0x8001_0033;
    const CR4_PAE_OSFXSR_OSXMMEXCPT: u64 = 1 << 5 | 1 << 9 | 1 << 10;
    const CR4_FSGSBASE: u64 = 1 << 16;
    const CR4_OSXSAVE: u64 = 1 << 18;
    const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
    const RFLAGS_IOPL_3: u64 = 0x3002;

    let code = kvm_segment {
        limit: u32::MAX,
        selector: layout::CODE_SELECTOR,
        type_: 11,
        present: 1,
        dpl: 3,
        s: 1,
        l: 1,
        g: 1,
        ..kvm_segment::default()
    };
    let data = kvm_segment { selector: layout::DATA_SELECTOR, type_: 3, l: 0, db: 1, ..code };
    let task = kvm_segment {
        base: layout.tss(index),
        limit: layout.tss_limit(index),
        selector: 0x40,
        type_: 11,
        present: 1,
        ..kvm_segment::default()
    };
    let mut cr4 = CR4_PAE_OSFXSR_OSXMMEXCPT;
    if features.fsgsbase {
        cr4 |= CR4_FSGSBASE;
    }
    if features.xcr0 != 0 {
        cr4 |= CR4_OSXSAVE;
    }
    StartRegisters {
        regs: kvm_regs { rip: entry, rflags: RFLAGS_IOPL_3, ..kvm_regs::default() },
        sregs: kvm_sregs {
            cs: code,
            ds: data,
            es: data,
            fs: data,
            gs: data,
            ss: data,
            tr: task,
            ldt: kvm_segment { unusable: 1, ..kvm_segment::default() },
            gdt: kvm_dtable { base: layout::GDT, limit: layout::GDT_LIMIT, ..kvm_dtable::default() },
            idt: kvm_dtable { base: layout::IDT, limit: layout::IDT_LIMIT, ..kvm_dtable::default() },
            cr0: CR0_PE_MP_ET_NE_WP_PG,
            cr3: layout.page_tables(),
            cr4,
            efer: EFER_LME_LMA,
            ..kvm_sregs::default()
        },
        ..StartRegisters::default()
    }
}
