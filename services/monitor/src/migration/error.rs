//! Errors of a migration.

use std::io;

/// A migration failed. The VM is at the source, except after [`MigrationError::InDoubt`] and the losses in post-copy.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// A stream broke.
    #[error("The migration's stream could not be {what}")]
    Stream {
        /// What was tried.
        what: &'static str,
        /// Error of the socket.
        #[source]
        source: io::Error,
    },
    /// The other side sent invalid data.
    #[error("The other side of the migration sent {0}")]
    Protocol(String),
    /// The versions of both sides don't overlap.
    #[error(
        "The other side of the migration speaks versions {lowest} to {highest} of the protocol, this one speaks {ours_lowest} to {ours}; use a version in between"
    )]
    Version {
        /// Oldest version of the other side.
        lowest: u16,
        /// Newest version of the other side.
        highest: u16,
        /// Oldest version of this side.
        ours_lowest: u16,
        /// Newest version of this side.
        ours: u16,
    },
    /// The destination has no key, and the source encrypts.
    #[error(
        "the stream is encrypted, and this side has no key: start the monitor that waits with --incoming-key FILE"
    )]
    NoKey,
    /// The destination has a key, and the source doesn't encrypt.
    #[error(
        "the stream isn't encrypted, and this side takes encrypted ones only: give `causeway migrate` its --key FILE"
    )]
    Plain,
    /// The sides have different keys.
    #[error(
        "The other side of the migration has another key: --key and --incoming-key must name the same one"
    )]
    Key,
    /// The destination refuses the VM.
    #[error("The destination refuses the VM: {0}")]
    Refused(String),
    /// The source aborted the migration.
    #[error("The source aborted the migration: {0}")]
    AbortedBySource(String),
    /// The VM has devices that can't migrate.
    #[error("The VM can't move, because of {0}")]
    Blocked(String),
    /// The host daemon, which serves devices of the VM, refuses or can't be reached.
    #[error("The host's daemon, which serves devices of the VM, refuses the migration")]
    Daemon(#[source] Box<control_api::host::HostError>),
    /// A served device refuses its state.
    #[error("Device {name} doesn't accept the VM's state; its server's log has the reason")]
    Device {
        /// Its name.
        name: String,
        /// The server's answer.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The host daemon uses no cluster service.
    #[error(
        "VMs with RDMA NICs move by the cluster service, which the host daemon at {0} doesn't use; start it with --cluster HOST:PORT --name HOST"
    )]
    NoCluster(String),
    /// The coordinator, or a host that takes part, aborted the migration.
    #[error("The migration was aborted: {0}")]
    Aborted(String),
    /// Post-copy isn't possible here.
    #[error("Post-copy isn't possible here: {0}")]
    NoPostcopy(String),
    /// The destination's version has no post-copy.
    #[error(
        "The destination speaks version {0} of the migration's protocol, which doesn't know post-copy (version {since} does): run a newer causeway there, or move the VM without --post-copy",
        since = super::postcopy::POSTCOPY_MIN_VERSION
    )]
    DestinationLacksPostcopy(u16),
    /// The disks can't be copied.
    #[error("The VM's disks can't be copied along: {0}")]
    NoMirror(String),
    /// The destination's version can't copy disks.
    #[error(
        "The destination speaks version {0} of the migration's protocol, which doesn't know how to copy disks along (version {since} does): run a newer causeway there, or move the VM without --mirror",
        since = super::mirror::MIRROR_MIN_VERSION
    )]
    DestinationLacksMirror(u16),
    /// An image of this side can't be written.
    #[error("The content of the source's disk can't be put into the image here")]
    MirrorWriteFailed(#[source] Box<virtio_devices::block::BlockError>),
    /// The guest writes its disks faster than they are copied.
    #[error(
        "The guest wrote its disks too fast to stop it for {downtime_ms} ms only, within {seconds} s after they were copied first: {left} bytes were left; allow a longer --downtime or --timeout, more --max-throttle, or use more streams"
    )]
    DisksNotConverging {
        /// The limit for the blackout.
        downtime_ms: u64,
        /// The time limit.
        seconds: u64,
        /// Bytes left.
        left: u64,
    },
    /// The source was lost in post-copy, and pages of the guest with it.
    #[error(
        "The connection to {from} was lost in post-copy while {left} pages of the VM's memory were still there: the VM is stopped, and can run neither here nor at its source"
    )]
    LostSource {
        /// Address of the source.
        from: String,
        /// Pages that weren't received.
        left: u64,
        /// What happened.
        #[source]
        source: Box<MigrationError>,
    },
    /// The destination was lost in post-copy, and the guest with it.
    #[error(
        "The connection to the destination was lost in post-copy before it confirmed that it has all of the VM's memory ({left} pages had not been sent): the VM can't run here, and can run there only if it had all pages"
    )]
    LostDestination {
        /// Pages that weren't sent.
        left: u64,
        /// What happened.
        #[source]
        source: Box<MigrationError>,
    },
    /// The user ended or resumed the VM before the decision was known.
    #[error(
        "The VM was ended, or resumed, before the decision about its migration was known: it may run at its other host, and if it was committed to this host it is lost"
    )]
    WaitEnded,
    /// The user cancelled.
    #[error("The migration was cancelled")]
    Cancelled,
    /// The guest writes memory faster than it is copied.
    #[error(
        "Memory changed too fast to stop the guest for {downtime_ms} ms only, within {seconds} s: {left} pages were left; allow a longer --downtime or --timeout, more --max-throttle, or use more streams"
    )]
    NotConverging {
        /// The limit for the blackout.
        downtime_ms: u64,
        /// The time limit.
        seconds: u64,
        /// Pages left.
        left: u64,
    },
    /// An operation on the machine failed.
    #[error("The VM could not be {what} for its migration")]
    Machine {
        /// What was tried.
        what: &'static str,
        /// Error of the operation.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The commit was sent to the destination, which hasn't confirmed it.
    #[error(
        "The commit was sent to the destination, which hasn't confirmed that it runs the VM; the VM is stopped here, in doubt. Check whether it runs there: if so, end it here with `causeway stop --force`, else resume it here with `causeway resume --force`"
    )]
    InDoubt(#[source] Box<MigrationError>),
}

impl MigrationError {
    /// For `map_err`: a stream failed while it was `what`.
    pub fn stream(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Stream { what, source }
    }

    /// For `map_err`: a machine could not be `what`.
    pub fn machine<E: std::error::Error + Send + Sync + 'static>(
        what: &'static str,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::Machine { what, source: Box::new(source) }
    }
}

/// An error and its causes on one line.
pub fn line(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(error.source(), |error| error.source());
    std::iter::once(error.to_string()).chain(sources.map(ToString::to_string)).collect::<Vec<_>>().join(": ")
}
