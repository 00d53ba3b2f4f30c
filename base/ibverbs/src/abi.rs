//! The parts of libibverbs' binary interface that Causeway uses (`<infiniband/verbs.h>`). The library keeps them stable since version 1.1
//! by versioned symbols. A test has the C compiler confirm sizes and offsets where the header is installed.

#![allow(missing_docs)] // Names are those of the header, without its prefixes.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `IBV_SYSFS_NAME_MAX`.
pub const NAME: usize = 64;
/// `IBV_QPT_RC`.
pub const QPT_RC: u32 = 2;
/// `IBV_GID_TYPE_ROCE_V2` of `enum ibv_gid_type`.
pub const GID_ROCE_V2: u32 = 2;
/// `IBV_PORT_ACTIVE`.
pub const PORT_ACTIVE: u32 = 4;

/// `enum ibv_qp_state`.
pub mod state {
    pub const INIT: u32 = 1;
    pub const RTR: u32 = 2;
    pub const RTS: u32 = 3;
}

/// `enum ibv_qp_attr_mask`.
pub mod mask {
    pub const STATE: i32 = 1 << 0;
    pub const ACCESS_FLAGS: i32 = 1 << 3;
    pub const PKEY_INDEX: i32 = 1 << 4;
    pub const PORT: i32 = 1 << 5;
    pub const AV: i32 = 1 << 7;
    pub const PATH_MTU: i32 = 1 << 8;
    pub const TIMEOUT: i32 = 1 << 9;
    pub const RETRY_CNT: i32 = 1 << 10;
    pub const RNR_RETRY: i32 = 1 << 11;
    pub const RQ_PSN: i32 = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: i32 = 1 << 13;
    pub const MIN_RNR_TIMER: i32 = 1 << 15;
    pub const SQ_PSN: i32 = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: i32 = 1 << 17;
    pub const DEST_QPN: i32 = 1 << 20;
}

/// `enum ibv_wr_opcode`.
pub mod opcode {
    pub const WRITE: u32 = 0;
    pub const WRITE_WITH_IMM: u32 = 1;
    pub const SEND: u32 = 2;
    pub const SEND_WITH_IMM: u32 = 3;
    pub const READ: u32 = 4;
    pub const CMP_AND_SWP: u32 = 5;
    pub const FETCH_AND_ADD: u32 = 6;
}

/// `enum ibv_send_flags`.
pub mod send {
    pub const FENCE: u32 = 1 << 0;
    pub const SIGNALED: u32 = 1 << 1;
    pub const SOLICITED: u32 = 1 << 2;
    pub const INLINE: u32 = 1 << 3;
}

/// `IBV_ACCESS_LOCAL_WRITE` of `enum ibv_access_flags`.
pub const ACCESS_LOCAL_WRITE: i32 = 1;
/// `IBV_WC_WR_FLUSH_ERR` of `enum ibv_wc_status`, whose 0 is success.
pub const WC_FLUSHED: u32 = 5;
/// `IBV_WC_RETRY_EXC_ERR`.
pub const WC_RETRY_EXCEEDED: u32 = 12;
/// `IBV_WC_RNR_RETRY_EXC_ERR`.
pub const WC_RNR_RETRY_EXCEEDED: u32 = 13;
/// `IBV_WC_RECV_RDMA_WITH_IMM`.
pub const WC_RECV_WRITE_IMM: u32 = 129;
/// `IBV_WC_WITH_IMM`.
pub const WC_WITH_IMM: u32 = 2;

/// `enum ibv_event_type`.
pub mod event {
    pub const QP_FATAL: u32 = 1;
    pub const QP_REQ_ERR: u32 = 2;
    pub const QP_ACCESS_ERR: u32 = 3;
}

#[repr(C)]
pub struct Device {
    pub ops: [usize; 2],
    pub node_type: u32,
    pub transport_type: u32,
    pub name: [c_char; NAME],
    /// Name of the character device.
    pub dev_name: [c_char; NAME],
}

#[repr(C)]
pub struct ContextOps {
    pub before: [usize; 11],
    pub poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    pub between: [usize; 12],
    pub post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    pub behind: [usize; 5],
}

#[repr(C)]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
}

#[repr(C)]
pub struct Pd {
    pub context: *mut Context,
    pub handle: u32,
}

#[repr(C)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub struct Channel {
    pub context: *mut Context,
    pub fd: c_int,
}

#[repr(C)]
pub struct Cq {
    pub context: *mut Context,
}

/// The library's type; only its first fields are declared.
#[repr(C)]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub handle: u32,
    pub qp_num: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct HostSge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

#[repr(C)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut HostSge,
    pub num_sge: c_int,
}

#[repr(C)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut HostSge,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: c_uint,
    /// In network byte order.
    pub imm_data: [u8; 4],
    pub wr: Target,
    pub qp_type: u64,
    pub bind_mw: [u64; 6],
}

/// The union of a request's remote parts.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Target {
    pub rdma: Rdma,
    pub atomic: Atomic,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: [u8; 4],
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// `union ibv_gid`, whose other member holds words of 64 bits.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub struct RawGid(pub [u8; 16]);

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct AhAttr {
    pub dgid: RawGid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub padding: u8,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpAttr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: u32,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

#[repr(C)]
pub struct AsyncEvent {
    /// The object that the event concerns, a pointer for most types.
    pub element: *mut c_void,
    pub event_type: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct GidEntry {
    pub gid: RawGid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

/// With room for fields that newer libraries add.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PortAttr {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    pub others: [u32; 32],
}

/// With room for fields that newer libraries add.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceAttr {
    pub fw_ver: [u8; 64],
    pub guids: [u64; 2],
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor: [u32; 3],
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: u32,
    pub counts: [c_int; 14],
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
    pub others: [u32; 16],
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::print_stderr)] // For tests only.
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};
    use std::process::Command;

    macro_rules! offsets {
        ($($ours:ident $theirs:literal: $($field:ident $path:literal),+;)*) => {
            vec![$($((format!("offsetof(struct {}, {})", $theirs, $path), offset_of!($ours, $field)),)+)*]
        };
    }

    /// C expressions, and the values that they must have.
    type Checks = Vec<(String, usize)>;

    fn offsets() -> Checks {
        offsets! {
            Device "ibv_device": name "name", dev_name "dev_name";
            Context "ibv_context": device "device", ops "ops", cmd_fd "cmd_fd", async_fd "async_fd";
            ContextOps "ibv_context_ops": poll_cq "poll_cq", req_notify_cq "req_notify_cq", post_send "post_send", post_recv "post_recv";
            Pd "ibv_pd": context "context", handle "handle";
            Mr "ibv_mr": lkey "lkey", rkey "rkey", length "length";
            Channel "ibv_comp_channel": fd "fd";
            Cq "ibv_cq": context "context";
            Qp "ibv_qp": context "context", handle "handle", qp_num "qp_num";
            HostSge "ibv_sge": addr "addr", length "length", lkey "lkey";
            RecvWr "ibv_recv_wr": wr_id "wr_id", next "next", sg_list "sg_list", num_sge "num_sge";
            SendWr "ibv_send_wr": wr_id "wr_id", next "next", sg_list "sg_list", num_sge "num_sge", opcode "opcode", send_flags "send_flags",
                imm_data "imm_data", wr "wr", qp_type "qp_type", bind_mw "bind_mw";
            Wc "ibv_wc": wr_id "wr_id", status "status", opcode "opcode", byte_len "byte_len", imm_data "imm_data", qp_num "qp_num", wc_flags "wc_flags";
            QpInitAttr "ibv_qp_init_attr": send_cq "send_cq", recv_cq "recv_cq", srq "srq", cap "cap", qp_type "qp_type", sq_sig_all "sq_sig_all";
            QpCap "ibv_qp_cap": max_send_wr "max_send_wr", max_recv_wr "max_recv_wr", max_send_sge "max_send_sge", max_recv_sge "max_recv_sge";
            AhAttr "ibv_ah_attr": dgid "grh.dgid", flow_label "grh.flow_label", sgid_index "grh.sgid_index", hop_limit "grh.hop_limit",
                traffic_class "grh.traffic_class", sl "sl", is_global "is_global", port_num "port_num";
            QpAttr "ibv_qp_attr": qp_state "qp_state", path_mtu "path_mtu", rq_psn "rq_psn", sq_psn "sq_psn", dest_qp_num "dest_qp_num",
                qp_access_flags "qp_access_flags", ah_attr "ah_attr", pkey_index "pkey_index", max_rd_atomic "max_rd_atomic",
                max_dest_rd_atomic "max_dest_rd_atomic", min_rnr_timer "min_rnr_timer", port_num "port_num", timeout "timeout",
                retry_cnt "retry_cnt", rnr_retry "rnr_retry", rate_limit "rate_limit";
            AsyncEvent "ibv_async_event": element "element", event_type "event_type";
            GidEntry "ibv_gid_entry": gid "gid", gid_type "gid_type", ndev_ifindex "ndev_ifindex";
            PortAttr "ibv_port_attr": state "state", active_mtu "active_mtu", gid_tbl_len "gid_tbl_len";
            DeviceAttr "ibv_device_attr": max_qp_wr "max_qp_wr", max_sge "max_sge", max_cqe "max_cqe", max_qp_rd_atom "max_qp_rd_atom",
                max_qp_init_rd_atom "max_qp_init_rd_atom", atomic_cap "atomic_cap", max_pkeys "max_pkeys", phys_port_cnt "phys_port_cnt";
        }
    }

    fn sizes_and_offsets_in_unions() -> Checks {
        let mut checks = Checks::new();
        for (theirs, ours) in [
            ("ibv_context_ops", size_of::<ContextOps>()),
            ("ibv_sge", size_of::<HostSge>()),
            ("ibv_recv_wr", size_of::<RecvWr>()),
            ("ibv_send_wr", size_of::<SendWr>()),
            ("ibv_wc", size_of::<Wc>()),
            ("ibv_qp_init_attr", size_of::<QpInitAttr>()),
            ("ibv_ah_attr", size_of::<AhAttr>()),
            ("ibv_qp_attr", size_of::<QpAttr>()),
            ("ibv_async_event", size_of::<AsyncEvent>()),
            ("ibv_gid_entry", size_of::<GidEntry>()),
        ] {
            checks.push((format!("sizeof(struct {theirs})"), ours));
        }
        for (path, ours) in [
            ("wr.rdma.rkey", offset_of!(SendWr, wr) + offset_of!(Rdma, rkey)),
            ("wr.atomic.compare_add", offset_of!(SendWr, wr) + offset_of!(Atomic, compare_add)),
            ("wr.atomic.swap", offset_of!(SendWr, wr) + offset_of!(Atomic, swap)),
            ("wr.atomic.rkey", offset_of!(SendWr, wr) + offset_of!(Atomic, rkey)),
        ] {
            checks.push((format!("offsetof(struct ibv_send_wr, {path})"), ours));
        }
        checks
    }

    fn usize_of(value: impl TryInto<usize>) -> usize {
        value.try_into().unwrap_or(usize::MAX)
    }

    fn constants_of_queue_pairs() -> Checks {
        let named = [
            ("IBV_SYSFS_NAME_MAX", NAME),
            ("IBV_QPT_RC", usize_of(QPT_RC)),
            ("IBV_GID_TYPE_ROCE_V2", usize_of(GID_ROCE_V2)),
            ("IBV_PORT_ACTIVE", usize_of(PORT_ACTIVE)),
            ("IBV_QPS_INIT", usize_of(state::INIT)),
            ("IBV_QPS_RTR", usize_of(state::RTR)),
            ("IBV_QPS_RTS", usize_of(state::RTS)),
            ("IBV_QP_STATE", usize_of(mask::STATE)),
            ("IBV_QP_ACCESS_FLAGS", usize_of(mask::ACCESS_FLAGS)),
            ("IBV_QP_PKEY_INDEX", usize_of(mask::PKEY_INDEX)),
            ("IBV_QP_PORT", usize_of(mask::PORT)),
            ("IBV_QP_AV", usize_of(mask::AV)),
            ("IBV_QP_PATH_MTU", usize_of(mask::PATH_MTU)),
            ("IBV_QP_TIMEOUT", usize_of(mask::TIMEOUT)),
            ("IBV_QP_RETRY_CNT", usize_of(mask::RETRY_CNT)),
            ("IBV_QP_RNR_RETRY", usize_of(mask::RNR_RETRY)),
            ("IBV_QP_RQ_PSN", usize_of(mask::RQ_PSN)),
            ("IBV_QP_MAX_QP_RD_ATOMIC", usize_of(mask::MAX_QP_RD_ATOMIC)),
            ("IBV_QP_MIN_RNR_TIMER", usize_of(mask::MIN_RNR_TIMER)),
            ("IBV_QP_SQ_PSN", usize_of(mask::SQ_PSN)),
            ("IBV_QP_MAX_DEST_RD_ATOMIC", usize_of(mask::MAX_DEST_RD_ATOMIC)),
            ("IBV_QP_DEST_QPN", usize_of(mask::DEST_QPN)),
        ];
        named.map(|(theirs, ours)| (theirs.to_owned(), ours)).into()
    }

    fn constants_of_work() -> Checks {
        let named = [
            ("IBV_WR_RDMA_WRITE", usize_of(opcode::WRITE)),
            ("IBV_WR_RDMA_WRITE_WITH_IMM", usize_of(opcode::WRITE_WITH_IMM)),
            ("IBV_WR_SEND", usize_of(opcode::SEND)),
            ("IBV_WR_SEND_WITH_IMM", usize_of(opcode::SEND_WITH_IMM)),
            ("IBV_WR_RDMA_READ", usize_of(opcode::READ)),
            ("IBV_WR_ATOMIC_CMP_AND_SWP", usize_of(opcode::CMP_AND_SWP)),
            ("IBV_WR_ATOMIC_FETCH_AND_ADD", usize_of(opcode::FETCH_AND_ADD)),
            ("IBV_SEND_FENCE", usize_of(send::FENCE)),
            ("IBV_SEND_SIGNALED", usize_of(send::SIGNALED)),
            ("IBV_SEND_SOLICITED", usize_of(send::SOLICITED)),
            ("IBV_SEND_INLINE", usize_of(send::INLINE)),
            ("IBV_ACCESS_LOCAL_WRITE", usize_of(ACCESS_LOCAL_WRITE)),
            ("IBV_WC_WR_FLUSH_ERR", usize_of(WC_FLUSHED)),
            ("IBV_WC_RETRY_EXC_ERR", usize_of(WC_RETRY_EXCEEDED)),
            ("IBV_WC_RNR_RETRY_EXC_ERR", usize_of(WC_RNR_RETRY_EXCEEDED)),
            ("IBV_WC_RECV_RDMA_WITH_IMM", usize_of(WC_RECV_WRITE_IMM)),
            ("IBV_WC_WITH_IMM", usize_of(WC_WITH_IMM)),
            ("IBV_EVENT_QP_FATAL", usize_of(event::QP_FATAL)),
            ("IBV_EVENT_QP_REQ_ERR", usize_of(event::QP_REQ_ERR)),
            ("IBV_EVENT_QP_ACCESS_ERR", usize_of(event::QP_ACCESS_ERR)),
        ];
        named.map(|(theirs, ours)| (theirs.to_owned(), ours)).into()
    }

    /// The C compiler and Debian's header agree with every offset and constant above. Without them the test reports that it is skipped.
    #[test]
    fn the_header_has_the_same_layout() {
        if !std::path::Path::new("/usr/include/infiniband/verbs.h").exists() {
            eprintln!(
                "SKIPPED: no <infiniband/verbs.h> here (package libibverbs-dev): layouts are NOT checked"
            );
            return;
        }
        let checks =
            [offsets(), sizes_and_offsets_in_unions(), constants_of_queue_pairs(), constants_of_work()]
                .concat();
        // At least as large as the header's type: the library writes all of its fields.
        let at_least = [
            ("sizeof(struct ibv_port_attr)", size_of::<PortAttr>()),
            ("sizeof(struct ibv_device_attr)", size_of::<DeviceAttr>()),
        ];
        let mut program = "#include <stddef.h>\n#include <infiniband/verbs.h>\n".to_owned();
        for (theirs, ours) in &checks {
            program.push_str(&format!("_Static_assert({theirs} == {ours}, \"{theirs} is not {ours}\");\n"));
        }
        for (theirs, ours) in at_least {
            program.push_str(&format!(
                "_Static_assert({theirs} <= {ours}, \"{theirs} is more than {ours}\");\n"
            ));
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("layout.c");
        std::fs::write(&file, program).unwrap();
        let compiler = Command::new("cc").args(["-std=c11", "-fsyntax-only"]).arg(&file).output();
        let Ok(result) = compiler else {
            facilities::missing(facilities::Facility::Cc, "layouts of libibverbs are not checked");
            return;
        };
        assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
    }
}
