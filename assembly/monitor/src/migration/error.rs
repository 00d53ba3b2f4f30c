//! Why a migration didn't come about.

use std::io;

/// A migration failed. Unless it is [`MigrationError::InDoubt`], the VM is where it was.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// A stream broke.
    #[error("The migration's stream could not be {what}")]
    Stream {
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The other side sent something that can't be.
    #[error("The other side of the migration sent {0}")]
    Protocol(String),
    /// It is of a version that isn't spoken here.
    #[error(
        "The other side of the migration speaks versions {lowest} to {highest} of the protocol, this one speaks {ours_lowest} to {ours}; use a version in between"
    )]
    Version {
        /// The oldest that it speaks.
        lowest: u16,
        /// Its own.
        highest: u16,
        /// The oldest that is spoken here.
        ours_lowest: u16,
        /// Ours.
        ours: u16,
    },
    /// The destination hasn't a key.
    #[error(
        "the stream is encrypted, and this side has no key: start the monitor that waits with --incoming-key FILE"
    )]
    NoKey,
    /// The destination has a key, the source doesn't encrypt.
    #[error(
        "the stream isn't encrypted, and this side takes encrypted ones only: give `causeway migrate` its --key FILE"
    )]
    Plain,
    /// Not the same.
    #[error(
        "The other side of the migration has another key: --key and --incoming-key must name the same one"
    )]
    Key,
    /// The destination can't take the VM.
    #[error("The destination refuses the VM: {0}")]
    Refused(String),
    /// The source gave up.
    #[error("The source gave the migration up: {0}")]
    Aborted(String),
    /// Devices that can't move.
    #[error("The VM can't move, because of {0}")]
    Immovable(String),
    /// The host's daemon, which serves devices of the VM, refuses or can't be asked.
    #[error("The host's daemon, which serves devices of the VM, doesn't move it")]
    Daemon(#[source] Box<control_api::host::HostError>),
    /// A served device doesn't take its state.
    #[error("Device {name} doesn't take the VM's state; its server's log says why")]
    Device {
        /// Its name.
        name: String,
        /// What its server answered.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A daemon without a cluster service.
    #[error(
        "VMs with RDMA NICs move by the cluster service, which the host daemon at {0} doesn't use; start it with --cluster HOST:PORT --name HOST"
    )]
    NoCluster(String),
    /// The coordinator, or a host that takes part, gave it up.
    #[error("The migration was given up: {0}")]
    GivenUp(String),
    /// Memory can't come after the guest here.
    #[error("Post-copy isn't possible here: {0}")]
    NoPostcopy(String),
    /// The destination doesn't know it.
    #[error(
        "The destination speaks version {0} of the migration's protocol, which doesn't know post-copy (version {since} does): run a newer causeway there, or move the VM without --post-copy",
        since = super::postcopy::SINCE
    )]
    OldDestination(u16),
    /// Disks can't be copied along.
    #[error("The VM's disks can't be copied along: {0}")]
    NoMirror(String),
    /// The destination doesn't know that.
    #[error(
        "The destination speaks version {0} of the migration's protocol, which doesn't know how to copy disks along (version {since} does): run a newer causeway there, or move the VM without --mirror",
        since = super::mirror::SINCE
    )]
    NoMirrorThere(u16),
    /// An image of this side can't be filled.
    #[error("The content of the source's disk can't be put into the image here")]
    NotMirrored(#[source] Box<virtio_devices::block::BlockError>),
    /// Disks change faster than they are copied.
    #[error(
        "The guest wrote its disks too fast to stop it for {downtime_ms} ms only, within {seconds} s after they were copied first: {left} bytes were left; allow a longer --downtime or --timeout, more --max-throttle, or use more streams"
    )]
    DisksNotConverging {
        /// How long the guest might stand still.
        downtime_ms: u64,
        /// The limit.
        seconds: u64,
        /// Bytes left.
        left: u64,
    },
    /// The source is gone, and pages with it.
    #[error(
        "The connection to {from} was lost in post-copy while {left} pages of the VM's memory were still there: the VM is stopped, it can't go on here nor at its source"
    )]
    LostSource {
        /// Where the source was.
        from: String,
        /// Pages that hadn't come.
        left: u64,
        /// What happened.
        #[source]
        source: Box<MigrationError>,
    },
    /// The destination is gone, and the guest with it.
    #[error(
        "The connection to the destination was lost in post-copy before it said that all of the VM's memory is there ({left} pages had not been sent): the VM can't go on here, and can there only if it had all pages"
    )]
    LostDestination {
        /// Pages that weren't sent.
        left: u64,
        /// What happened.
        #[source]
        source: Box<MigrationError>,
    },
    /// The user didn't wait for the decision.
    #[error(
        "The VM was ended, or let go on, before it was known how its migration was decided: it may run at its other host, and if it was decided to run here it is lost"
    )]
    NotAwaited,
    /// The user cancelled.
    #[error("The migration was cancelled")]
    Cancelled,
    /// Memory changes faster than it is copied.
    #[error(
        "Memory changed too fast to stop the guest for {downtime_ms} ms only, within {seconds} s: {left} pages were left; allow a longer --downtime or --timeout, more --max-throttle, or use more streams"
    )]
    NotConverging {
        /// How long the guest might stand still.
        downtime_ms: u64,
        /// The limit.
        seconds: u64,
        /// Pages left.
        left: u64,
    },
    /// The machine.
    #[error("The VM could not be {what} for its migration")]
    Machine {
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The destination was told to run the VM, and nothing was heard of it since.
    #[error(
        "The destination was told to run the VM and hasn't said that it does; the VM stands still here. See whether it runs there: if so, end it here with `causeway stop --force`, else let it go on here with `causeway resume --force`"
    )]
    InDoubt(#[source] Box<MigrationError>),
}

impl MigrationError {
    /// A stream that failed while it was `what`.
    pub fn stream(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Stream { what, source }
    }

    /// A machine that could not be `what`.
    pub fn machine<E: std::error::Error + Send + Sync + 'static>(
        what: &'static str,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::Machine { what, source: Box::new(source) }
    }
}

/// An error with what it was caused by, on one line.
pub fn line(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(error.source(), |error| error.source());
    std::iter::once(error.to_string()).chain(sources.map(ToString::to_string)).collect::<Vec<_>>().join(": ")
}
