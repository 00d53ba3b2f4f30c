//! Why a network device can't be opened.

use std::io;

/// Opening or restoring a network device failed; the guest never causes these.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A number is outside what the device supports.
    #[error("Network device {name}: {what} is {value}; {allowed}")]
    Range {
        /// Device name.
        name: String,
        /// Which setting.
        what: &'static str,
        /// What was asked for.
        value: u64,
        /// What is possible.
        allowed: String,
    },
    /// The MAC address can't be a station's.
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
        /// What to do.
        advice: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The interface name is unusable.
    #[error("{ifname:?} is no interface name: 1 to 15 bytes without '/' and spaces are possible")]
    InterfaceName {
        /// The name.
        ifname: String,
    },
    /// The tap doesn't exist, and creating it isn't permitted.
    #[error(
        "Tap {ifname} doesn't exist and this process may not create it; create it as root with: ip tuntap add {ifname} mode tap user {user}{multi_queue} && ip link set {ifname} up"
    )]
    TapMissing {
        /// The name.
        ifname: String,
        /// Who runs this process.
        user: String,
        /// ` multi_queue` when several queue pairs were asked for.
        multi_queue: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The interface exists, but isn't ours to use.
    #[error("Tap {ifname} can't be used: {advice}")]
    TapUnusable {
        /// The name.
        ifname: String,
        /// What is wrong and what to do.
        advice: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An interface of that name exists that is no tap.
    #[error("{ifname} is a network interface, but no tap; choose another name or remove it")]
    NotATap {
        /// The name.
        ifname: String,
    },
    /// A file descriptor that was passed in isn't a tap with the flags that are needed.
    #[error("File descriptor {fd} is no tap opened with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR")]
    NotATapFd {
        /// Its number.
        fd: i32,
    },
    /// The MTU of the tap is smaller than the one asked for.
    #[error(
        "Tap {ifname} has an MTU of {have}, less than the {want} asked for; raise it with: ip link set {ifname} mtu {want}"
    )]
    TapMtu {
        /// The name.
        ifname: String,
        /// MTU of the tap.
        have: u16,
        /// MTU asked for.
        want: u16,
    },
    /// `passt` isn't there.
    #[error(
        "--net user needs the program passt, which isn't installed; install it with: apt-get install passt"
    )]
    PasstMissing,
    /// `passt` ended at once.
    #[error("passt ended at its start ({status}): {output}")]
    PasstEnded {
        /// Exit status.
        status: std::process::ExitStatus,
        /// What it printed.
        output: String,
    },
    /// A system call failed.
    #[error("Network device {name} could not {what}")]
    Host {
        /// Device name.
        name: String,
        /// What was tried.
        what: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Saved state that doesn't fit.
    #[error("Network device {name}: the saved state can't be used: {reason}")]
    Saved {
        /// Device name.
        name: String,
        /// Why.
        reason: String,
    },
}
