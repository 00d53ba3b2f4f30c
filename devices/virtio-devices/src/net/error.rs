//! Why a network device can't be opened.

use std::io;

/// Why a network device can't be opened or restored. Never caused by the guest.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A number out of the supported range.
    #[error("Network device {name}: {what} is {value}; {allowed}")]
    Range {
        /// Device name.
        name: String,
        /// Name of the setting.
        what: &'static str,
        /// Configured value.
        value: u64,
        /// Supported range.
        allowed: String,
    },
    /// The MAC address isn't a unicast address.
    #[error(
        "Network device {name}: {mac} is no address of a single station; use one whose first byte is even and that isn't all zero"
    )]
    Mac {
        /// Device name.
        name: String,
        /// The address.
        mac: super::MacAddress,
    },
    /// `/dev/net/tun` doesn't open.
    #[error("/dev/net/tun can't be opened; {advice}")]
    TunDevice {
        /// Advice for the user.
        advice: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The interface name is invalid.
    #[error("{ifname:?} is no interface name: 1 to 15 bytes without '/' and spaces are possible")]
    InterfaceName {
        /// The name.
        ifname: String,
    },
    /// The tap doesn't exist, and this user may not create it.
    #[error(
        "Tap {ifname} doesn't exist and this process may not create it; create it as root with: ip tuntap add {ifname} mode tap user {user}{multi_queue} && ip link set {ifname} up"
    )]
    TapMissing {
        /// Name of the interface.
        ifname: String,
        /// User of this process.
        user: String,
        /// ` multi_queue` when several queue pairs are configured.
        multi_queue: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The interface exists, but can't be used.
    #[error("Tap {ifname} can't be used: {advice}")]
    TapUnusable {
        /// Name of the interface.
        ifname: String,
        /// The problem, and advice for the user.
        advice: String,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The interface exists and isn't a tap.
    #[error("{ifname} is a network interface, but no tap; choose another name or remove it")]
    NotATap {
        /// Name of the interface.
        ifname: String,
    },
    /// A passed file descriptor isn't a tap with the required flags.
    #[error("File descriptor {fd} is no tap opened with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR")]
    NotATapFd {
        /// Number of the descriptor.
        fd: i32,
    },
    /// The tap's MTU is smaller than the configured one.
    #[error(
        "Tap {ifname} has an MTU of {have}, less than the {want} asked for; raise it with: ip link set {ifname} mtu {want}"
    )]
    TapMtu {
        /// Name of the interface.
        ifname: String,
        /// MTU of the tap.
        have: u16,
        /// Configured MTU.
        want: u16,
    },
    /// `passt` isn't installed.
    #[error(
        "--net user needs the program passt, which isn't installed; install it with: apt-get install passt"
    )]
    PasstMissing,
    /// `passt` ended right after its start.
    #[error("passt ended at its start ({status}): {output}")]
    PasstEnded {
        /// Exit status.
        status: std::process::ExitStatus,
        /// Its output.
        output: String,
    },
    /// A system call failed.
    #[error("Network device {name} could not {what}")]
    Host {
        /// Device name.
        name: String,
        /// The failed operation.
        what: String,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The saved state doesn't fit.
    #[error("Network device {name}: the saved state can't be used: {reason}")]
    Saved {
        /// Device name.
        name: String,
        /// The reason.
        reason: String,
    },
}
