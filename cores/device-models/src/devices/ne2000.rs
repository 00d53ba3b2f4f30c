//! NE2000-PCI, as the RTL8029AS: a DP8390 core with 16 KiB of memory on the card, accessed through a data port.
//!
//! The card has no bus mastering: the CPU moves packets through the data port. A guest could reach other parts of the
//! card's memory, which may contain the station address and other guests' packets.

use crate::describe::{
    Bank, Bar, BusMaster, Check, Class, Component, Cond, Context, Device, Direction, Effect, Event, Expr,
    Interrupts, Memory, Pages, Pci, Permission, Poke, Polled, Reg, Register, Returns, Space, State, Station,
    Step, Store, Transition, Window, WindowId, on, register, states, table,
};

const PAGE0: u8 = 1;
const PAGE1: u8 = 2;
const PAGE2: u8 = 4;
const PAGE3: u8 = 8;

/// CR: stop.
pub const STP: u32 = 0x01;
/// CR: transmit.
pub const TXP: u32 = 0x04;
/// RCR: monitor mode, stores nothing.
pub const MON: u32 = 0x20;
/// RCR: promiscuous.
pub const PRO: u32 = 0x10;
/// ISR: received.
pub const PRX: u32 = 0x01;
/// ISR: transmitted.
pub const PTX: u32 = 0x02;
/// ISR: received with an error.
pub const RXE: u32 = 0x04;
/// ISR: transmit error.
pub const TXE: u32 = 0x08;
/// ISR: ring full.
pub const OVW: u32 = 0x10;
/// ISR: remote transfer complete.
pub const RDC: u32 = 0x40;
/// ISR: stopped.
pub const RST: u32 = 0x80;
/// DCR: the data port moves words.
pub const WTS: u32 = 0x01;
/// First byte of the packet memory.
pub const MEMORY: u32 = 0x4000;
/// Byte after it.
pub const MEMORY_END: u32 = 0x8000;
/// The longest frame, without CRC.
pub const MAX_FRAME_BYTES: u64 = 1518;

table! { REGISTERS: Register => Reg {
    CR = register("CR", 0x0).class(Class::Free, Class::Dma).reset(0x21).store(Store::Sticky(TXP)).returns(Returns::Bits(TXP)).becomes(TXP, 0, PTX).late_watched()
        .values(&[0x21, 0x22, 0x61, 0x62, 0x26, 0x0A, 0x12, 0x16, 0x1A, 0x02]).about("stop, start, transmit, remote transfer, bank");
    PSTART = register("PSTART", 0x1).banks(PAGE0).writes(Class::Check).late().values(&[0x00, 0x4C]).about("first page of the ring");
    PSTOP = register("PSTOP", 0x2).banks(PAGE0).writes(Class::Check).late().values(&[0x80, 0xFF]).about("page after the ring");
    BNRY = register("BNRY", 0x3).banks(PAGE0).class(Class::Free, Class::Check).returns(Returns::Shadow).late().values(&[0x4C])
        .about("last page the driver has read");
    TPSR = register("TPSR", 0x4).banks(PAGE0).writes(Class::Check).late().values(&[0x00, 0x40]).about("page of the frame to send");
    TBCR0 = register("TBCR0", 0x5).banks(PAGE0).writes(Class::Check).late().about("its length, low byte");
    TBCR1 = register("TBCR1", 0x6).banks(PAGE0).writes(Class::Check).late().values(&[0x00, 0x05, 0xFF]).about("its length, high byte");
    ISR = register("ISR", 0x7).banks(PAGE0).class(Class::Virtual, Class::Virtual).reset(RST).store(Store::ClearOnes(0x7F)).late()
        .about("interrupt status");
    RSAR0 = register("RSAR0", 0x8).banks(PAGE0).writes(Class::Check).late().about("remote address, low byte");
    RSAR1 = register("RSAR1", 0x9).banks(PAGE0).writes(Class::Check).late().values(&[0x00, 0x40]).about("remote address, high byte");
    RBCR0 = register("RBCR0", 0xA).banks(PAGE0).writes(Class::Check).late().about("remote count, low byte");
    RBCR1 = register("RBCR1", 0xB).banks(PAGE0).writes(Class::Check).late().values(&[0x00, 0x01, 0xFF]).about("remote count, high byte");
    RCR = register("RCR", 0xC).banks(PAGE0).writes(Class::Check).reset(MON).late().values(&[MON, 0x04]).about("receive configuration");
    TCR = register("TCR", 0xD).banks(PAGE0).writes(Class::Shadow).late().about("transmit configuration");
    DCR = register("DCR", 0xE).banks(PAGE0).writes(Class::Shadow).reset(0x49).late().about("data configuration");
    IMR = register("IMR", 0xF).banks(PAGE0).writes(Class::Virtual).store(Store::Plain(0x7F)).late_watched().about("interrupt mask");
    CLDA0 = register("CLDA0", 0x1).banks(PAGE0).reads(Class::Free);
    CLDA1 = register("CLDA1", 0x2).banks(PAGE0).reads(Class::Free);
    TSR = register("TSR", 0x4).banks(PAGE0).reads(Class::Free).returns(Returns::Shadow).about("transmit status");
    NCR = register("NCR", 0x5).banks(PAGE0).reads(Class::Free).returns(Returns::Shadow).about("collisions");
    FIFO = register("FIFO", 0x6).banks(PAGE0).reads(Class::Free);
    CRDA0 = register("CRDA0", 0x8).banks(PAGE0).reads(Class::Free).about("remote address now, low byte");
    CRDA1 = register("CRDA1", 0x9).banks(PAGE0).reads(Class::Free).about("remote address now, high byte");
    ID0 = register("8029ID0", 0xA).banks(PAGE0).reads(Class::Deny).reset(0x50);
    ID1 = register("8029ID1", 0xB).banks(PAGE0).reads(Class::Deny).reset(0x43);
    RSR = register("RSR", 0xC).banks(PAGE0).reads(Class::Free).returns(Returns::Shadow).about("receive status");
    CNTR0 = register("CNTR0", 0xD).banks(PAGE0).reads(Class::Free).about("alignment errors, clears");
    CNTR1 = register("CNTR1", 0xE).banks(PAGE0).reads(Class::Free).about("CRC errors, clears");
    CNTR2 = register("CNTR2", 0xF).banks(PAGE0).reads(Class::Free).about("missed frames, clears");
    PAR0 = par("PAR0", 0x1); PAR1 = par("PAR1", 0x2); PAR2 = par("PAR2", 0x3);
    PAR3 = par("PAR3", 0x4); PAR4 = par("PAR4", 0x5); PAR5 = par("PAR5", 0x6);
    CURR = register("CURR", 0x7).banks(PAGE1).class(Class::Free, Class::Check).values(&[0x4C, 0xFF]).late()
        .returns(Returns::Within(Expr::Reg(PSTART), Expr::Reg(PSTOP))).about("page the next frame goes to");
    MAR0 = mar("MAR0", 0x8); MAR1 = mar("MAR1", 0x9); MAR2 = mar("MAR2", 0xA); MAR3 = mar("MAR3", 0xB);
    MAR4 = mar("MAR4", 0xC); MAR5 = mar("MAR5", 0xD); MAR6 = mar("MAR6", 0xE); MAR7 = mar("MAR7", 0xF);
    PSTART2 = register("PSTART", 0x1).banks(PAGE2).mirrors(PSTART);
    PSTOP2 = register("PSTOP", 0x2).banks(PAGE2).mirrors(PSTOP);
    TPSR2 = register("TPSR", 0x4).banks(PAGE2).mirrors(TPSR);
    RCR2 = register("RCR", 0xC).banks(PAGE2).mirrors(RCR);
    TCR2 = register("TCR", 0xD).banks(PAGE2).mirrors(TCR);
    DCR2 = register("DCR", 0xE).banks(PAGE2).mirrors(DCR);
    IMR2 = register("IMR", 0xF).banks(PAGE2).mirrors(IMR);
    EECR = register("9346CR", 0x1).banks(PAGE3).class(Class::Deny, Class::Deny).about("EEPROM, unlocks CONFIG");
    CONFIG0 = register("CONFIG0", 0x3).banks(PAGE3).class(Class::Deny, Class::Deny);
    CONFIG2 = register("CONFIG2", 0x5).banks(PAGE3).class(Class::Deny, Class::Deny).reset(0x40);
    CONFIG3 = register("CONFIG3", 0x6).banks(PAGE3).class(Class::Deny, Class::Deny).reset(0x40);
    DATA = register("data", 0x10).port(8).class(Class::Free, Class::Shadow).late().values(&[0x5A5A_5A5A]).about("data port of the remote transfer");
    RESET = register("reset", 0x18).port(8).class(Class::Virtual, Class::Virtual).about("a read resets");
    LEFT = register("left", 0).internal().width(2).values(&[0, 4]).about("bytes left of the remote transfer");
    POS = register("position", 0).internal().width(2).values(&[0]).about("byte of the station PROM that is read next");
    MAC0 = mac("MAC0"); MAC1 = mac("MAC1"); MAC2 = mac("MAC2"); MAC3 = mac("MAC3"); MAC4 = mac("MAC4"); MAC5 = mac("MAC5");
} }

const fn par(name: &'static str, offset: u32) -> Register {
    register(name, offset)
        .banks(PAGE1)
        .class(Class::Free, Class::Check)
        .returns(Returns::Shadow)
        .late()
        .about("station address")
}

const fn mar(name: &'static str, offset: u32) -> Register {
    register(name, offset)
        .banks(PAGE1)
        .class(Class::Free, Class::Shadow)
        .returns(Returns::Shadow)
        .late()
        .about("multicast filter")
}

const fn mac(name: &'static str) -> Register {
    register(name, 0).internal().about("the guest's address")
}

states! { COMPONENTS {
    0 "run": STOPPED = "stopped", RUNNING = "running";
    1 "tx": TX_IDLE = "idle", TX_BUSY = "busy";
    2 "rdma": RDMA_IDLE = "idle", RDMA_READ = "read", RDMA_WRITE = "write", RDMA_PROM = "prom";
    3 "ring": UNCHECKED = "unchecked", CHECKED = "checked";
} }

table! { WINDOWS: Window => WindowId {
    RING = Window {
        name: "receive ring",
        space: CARD,
        direction: Direction::DeviceWrites,
        base: Expr::Shl(&Expr::Reg(PSTART), 8),
        length: Expr::If(&RING_SANE, &Expr::Shl(&Expr::Minus(&Expr::Reg(PSTOP), &Expr::Reg(PSTART)), 8), &ENDLESS),
        active: Cond::All(&[Cond::Clear(CR, STP), Cond::Clear(RCR, MON)]),
        standing: None,
        never: false,
    };
    FRAME = Window {
        name: "frame to send",
        space: CARD,
        direction: Direction::DeviceReads,
        base: Expr::Shl(&Expr::Reg(TPSR), 8),
        length: TBCR,
        active: Cond::Set(CR, TXP),
        standing: None,
        never: false,
    };
    REMOTE = Window {
        name: "remote write",
        space: CARD,
        direction: Direction::DeviceWrites,
        base: RSAR,
        // A dword write as the last access reaches up to three bytes beyond the count.
        length: Expr::If(&WRAPS, &Expr::Minus(&Expr::Shl(&Expr::Reg(PSTOP), 8), &RSAR), &Expr::Sum(&[RBCR, Expr::Const(3)])),
        active: REMOTE_WRITE,
        standing: None,
        never: false,
    };
    WRAPPED = Window {
        name: "remote write behind the ring's end",
        space: CARD,
        direction: Direction::DeviceWrites,
        base: Expr::Shl(&Expr::Reg(PSTART), 8),
        length: Expr::Minus(&REMOTE_END, &Expr::Shl(&Expr::Reg(PSTOP), 8)),
        active: Cond::All(&[REMOTE_WRITE, WRAPS]),
        standing: None,
        never: true,
    };
} }

const CARD: Space = Space::Card { from: MEMORY as u64, to: MEMORY_END as u64 };
/// Length for a device whose pointer runs past the end of its ring: it continues through the whole address space.
const ENDLESS: Expr = Expr::Const(0x1_0000);
const RSAR: Expr = Expr::Sum(&[Expr::Reg(RSAR0), Expr::Shl(&Expr::Reg(RSAR1), 8)]);
const RBCR: Expr = Expr::Sum(&[Expr::Reg(RBCR0), Expr::Shl(&Expr::Reg(RBCR1), 8)]);
const TBCR: Expr = Expr::Sum(&[Expr::Reg(TBCR0), Expr::Shl(&Expr::Reg(TBCR1), 8)]);
const REMOTE_END: Expr = Expr::Sum(&[RSAR, RBCR, Expr::Const(3)]);
const NOTHING: Cond = Cond::Equal(RBCR, Expr::Const(0));
const REMOTE_WRITE: Cond = Cond::All(&[Cond::Is(CR, 0x38, 0x10), Cond::Not(&NOTHING)]);
/// A remote address that reaches PSTOP wraps to PSTART.
const WRAPS: Cond = Cond::All(&[
    Cond::Less(RSAR, Expr::Shl(&Expr::Reg(PSTOP), 8)),
    Cond::Less(Expr::Shl(&Expr::Reg(PSTOP), 8), REMOTE_END),
]);
const RING_SANE: Cond = Cond::All(&[
    Cond::Less(Expr::Reg(PSTART), Expr::Reg(PSTOP)),
    Cond::AtMost(Expr::Reg(PSTART), Expr::Reg(CURR)),
    Cond::Less(Expr::Reg(CURR), Expr::Reg(PSTOP)),
    // Linux writes the page before the next one to read. If that is the ring's first page, the value is outside the
    // ring. The device still writes between PSTART and PSTOP.
    Cond::AtMost(Expr::Reg(PSTART), Expr::Sum(&[Expr::Reg(BNRY), Expr::Const(1)])),
    Cond::Less(Expr::Reg(BNRY), Expr::Reg(PSTOP)),
]);
const RING_CHECKS: &[Check] = &[
    Check::Rule("PSTART < PSTOP, with CURR between them, and BNRY too or a page before", RING_SANE),
    Check::Window(RING),
];
const LISTENS: Cond = Cond::Clear(RCR, MON);
/// Address of the remote transfer: RSAR plus the bytes moved, with wraparound in the ring.
const AT: Expr = Expr::Minus(&Expr::Sum(&[RSAR, RBCR]), &Expr::Reg(LEFT));
const AT_WRAPPED: Expr = Expr::If(
    &Cond::All(&[
        Cond::Less(RSAR, Expr::Shl(&Expr::Reg(PSTOP), 8)),
        Cond::AtMost(Expr::Shl(&Expr::Reg(PSTOP), 8), AT),
    ]),
    &Expr::Minus(&Expr::Sum(&[AT, Expr::Shl(&Expr::Reg(PSTART), 8)]), &Expr::Shl(&Expr::Reg(PSTOP), 8)),
    &AT,
);
const MOVING: Cond = Cond::Any(&[Cond::In(RDMA_READ), Cond::In(RDMA_WRITE)]);
/// The station PROM: each byte of the address twice, 57h at the end.
#[rustfmt::skip] // A table: a row is a line.
const PROM: &[Expr] = &[
    Expr::Reg(MAC0), Expr::Reg(MAC1), Expr::Reg(MAC2), Expr::Reg(MAC3), Expr::Reg(MAC4), Expr::Reg(MAC5),
    Expr::Const(0), Expr::Const(0), Expr::Const(0), Expr::Const(0), Expr::Const(0), Expr::Const(0), Expr::Const(0), Expr::Const(0),
    Expr::Const(0x57), Expr::Const(0x57), Expr::Const(0xFF),
];
const PROM_NOW: Expr = Expr::Pick(&Expr::Bits(POS, 1, 15), PROM);
const PROM_NEXT: Expr = Expr::Pick(&Expr::Sum(&[Expr::Bits(POS, 1, 15), Expr::Const(1)]), PROM);
const PROM_DWORD: Expr =
    Expr::Sum(&[PROM_NOW, Expr::Shl(&PROM_NOW, 8), Expr::Shl(&PROM_NEXT, 16), Expr::Shl(&PROM_NEXT, 24)]);
/// Bytes that an access to the data port moves: at least two in word mode.
const MOVED: Expr = Expr::If(
    &Cond::All(&[Cond::Set(DCR, WTS), Cond::Equal(Expr::AccessSize, Expr::Const(1))]),
    &Expr::Const(2),
    &Expr::AccessSize,
);
const MORE: Cond = Cond::Less(MOVED, Expr::Reg(LEFT));
const LAST: Cond = Cond::Not(&MORE);
const COUNT: Effect = Effect::Store(LEFT, Expr::Minus(&Expr::Reg(LEFT), &MOVED));
const ADVANCE: Effect = Effect::Store(POS, Expr::Sum(&[Expr::Reg(POS), MOVED]));
const DONE: &[Effect] = &[Effect::Store(LEFT, Expr::Const(0)), Effect::Enter(RDMA_IDLE), Effect::Raise(RDC)];
const STEERING: Check =
    Check::Refuse("the registers of a remote transfer stay as they are until it is aborted (CR bit 5)");
/// CR has a remote command. Cards differ in whether a complete one continues after a new count.
const COMMANDED: Cond = Cond::Clear(CR, 0x20);
const SENDING: Check = Check::Refuse("the registers of a frame stay as they are while it is sent");
const ACTIVE: &[State] = &[RDMA_READ, RDMA_WRITE, RDMA_PROM];

macro_rules! all_equal {
    ($($par:expr => $to:expr),*) => { Cond::All(&[$(Cond::Equal(Expr::Reg($par), $to)),*]) };
}

/// The guest's own address, or all zeros.
#[rustfmt::skip] // A table: a row is a line.
const OWN_ADDRESS: Cond = Cond::Any(&[
    all_equal!(PAR0 => Expr::Reg(MAC0), PAR1 => Expr::Reg(MAC1), PAR2 => Expr::Reg(MAC2), PAR3 => Expr::Reg(MAC3), PAR4 => Expr::Reg(MAC4), PAR5 => Expr::Reg(MAC5)),
    all_equal!(PAR0 => Expr::Const(0), PAR1 => Expr::Const(0), PAR2 => Expr::Const(0), PAR3 => Expr::Const(0), PAR4 => Expr::Const(0), PAR5 => Expr::Const(0)),
]);

macro_rules! address {
    ($par:expr, $mac:expr) => {
        on(Event::Write($par))
            .states(&[RUNNING])
            .given(Cond::Not(&Cond::Equal(Expr::Reg($par), Expr::Reg($mac))))
            .checks(&[Check::Allowed(Permission::AnyAddress)])
    };
}

#[rustfmt::skip] // A table: a row is a line.
const TRANSITIONS: &[Transition] = &[
    // CR: several of these may fire at one write.
    on(Event::Write(CR)).given(Cond::Set(CR, STP)).then(&[Effect::Enter(STOPPED), Effect::Raise(RST)]),
    on(Event::Write(CR)).given(Cond::Clear(CR, STP)).then(&[Effect::Enter(RUNNING), Effect::Lower(RST)]),
    on(Event::Write(CR)).states(&[UNCHECKED]).given(Cond::All(&[Cond::Clear(CR, STP), LISTENS])).checks(RING_CHECKS)
        .then(&[Effect::Enter(CHECKED)]).about("the receiver starts: the ring is checked once, not per packet"),
    on(Event::Write(CR)).states(&[STOPPED]).given(Cond::All(&[Cond::Clear(CR, STP), Cond::Not(&OWN_ADDRESS)]))
        .checks(&[Check::Allowed(Permission::AnyAddress)]).about("Linux writes zeroes while it looks for the card; it listens when it starts"),
    on(Event::Write(CR)).states(&[TX_IDLE]).given(Cond::Set(CR, TXP)).checks(&[
        Check::Rule("1 <= TBCR <= 1518", Cond::All(&[Cond::Less(Expr::Const(0), TBCR), Cond::AtMost(TBCR, Expr::Const(MAX_FRAME_BYTES))])),
        Check::Window(FRAME),
    ]).then(&[Effect::Enter(TX_BUSY)]),
    on(Event::Write(CR)).states(&[TX_IDLE]).given(Cond::All(&[Cond::Set(CR, TXP), Cond::Set(TCR, 0x06)]))
        .checks(&[Check::Allowed(Permission::Loopback)]).about("drivers set loopback while they initialise; only sending in it is vetted"),
    on(Event::Write(CR)).given(Cond::Any(&[Cond::Is(CR, 0x38, 0x00), Cond::Is(CR, 0x38, 0x18)]))
        .checks(&[Check::Refuse("remote command 0 is not allowed and 3 (send packet) is not offered")]),
    on(Event::Write(CR)).given(Cond::Set(CR, 0x20)).then(&[Effect::Enter(RDMA_IDLE)]),
    on(Event::Write(CR)).given(Cond::All(&[Cond::Is(CR, 0x38, 0x08), Cond::AtMost(Expr::Const(MEMORY as u64), RSAR)]))
        .then(&[Effect::Enter(RDMA_READ), Effect::Store(LEFT, RBCR)]).about("reading is harmless: the card is scrubbed between guests"),
    on(Event::Write(CR)).given(Cond::All(&[Cond::Is(CR, 0x38, 0x08), Cond::Less(RSAR, Expr::Const(MEMORY as u64))]))
        .then(&[Effect::Enter(RDMA_PROM), Effect::Store(LEFT, RBCR), Effect::Store(POS, RSAR)]).about("the address is the guest's own"),
    on(Event::Write(CR)).given(REMOTE_WRITE).checks(&[
        Check::Window(REMOTE),
        Check::Rule("a transfer doesn't run through the end of the ring", Cond::Not(&WRAPS)),
    ]).then(&[Effect::Enter(RDMA_WRITE), Effect::Store(LEFT, RBCR)]),
    on(Event::Write(CR)).given(Cond::All(&[Cond::Clear(CR, 0x20), NOTHING])).then(DONE),
    // The data port.
    on(Event::Write(DATA)).states(&[RDMA_WRITE]).given(MORE).then(&[COUNT]),
    on(Event::Write(DATA)).states(&[RDMA_WRITE]).given(LAST).then(DONE),
    on(Event::Write(DATA)).states(&[RDMA_IDLE, RDMA_READ, RDMA_PROM]).checks(&[Check::Refuse("no remote write runs")]),
    on(Event::Read(DATA)).states(&[RDMA_IDLE, RDMA_WRITE]).then(&[Effect::Answer(Expr::Const(0))]),
    on(Event::Read(DATA)).states(&[RDMA_READ]).given(MORE).then(&[COUNT]),
    on(Event::Read(DATA)).states(&[RDMA_READ]).given(LAST).then(DONE),
    on(Event::Read(DATA)).states(&[RDMA_PROM]).then(&[Effect::Answer(PROM_DWORD), ADVANCE]),
    on(Event::Read(DATA)).states(&[RDMA_PROM]).given(MORE).then(&[COUNT]),
    on(Event::Read(DATA)).states(&[RDMA_PROM]).given(LAST).then(DONE),
    on(Event::Write(RSAR0)).given(COMMANDED).checks(&[STEERING]),
    on(Event::Write(RSAR1)).given(COMMANDED).checks(&[STEERING]),
    on(Event::Write(RBCR0)).given(COMMANDED).checks(&[STEERING]),
    on(Event::Write(RBCR1)).given(COMMANDED).checks(&[STEERING]),
    on(Event::Write(PSTART)).given(COMMANDED).checks(&[STEERING]),
    on(Event::Write(PSTOP)).given(COMMANDED).checks(&[STEERING]),
    on(Event::Write(TPSR)).states(&[TX_BUSY]).checks(&[SENDING]),
    on(Event::Write(TBCR0)).states(&[TX_BUSY]).checks(&[SENDING]),
    on(Event::Write(TBCR1)).states(&[TX_BUSY]).checks(&[SENDING]),
    // The ring. A change while the receiver is off requires a check at the next start. A change while it runs is
    // checked at once.
    on(Event::Write(PSTART)).states(&[STOPPED]).then(&[Effect::Enter(UNCHECKED)]),
    on(Event::Write(PSTOP)).states(&[STOPPED]).then(&[Effect::Enter(UNCHECKED)]),
    on(Event::Write(CURR)).states(&[STOPPED]).then(&[Effect::Enter(UNCHECKED)]),
    on(Event::Write(BNRY)).states(&[STOPPED]).then(&[Effect::Enter(UNCHECKED)]),
    on(Event::Write(PSTART)).states(&[RUNNING]).given(Cond::Not(&LISTENS)).then(&[Effect::Enter(UNCHECKED)]),
    on(Event::Write(PSTOP)).states(&[RUNNING]).given(Cond::Not(&LISTENS)).then(&[Effect::Enter(UNCHECKED)]),
    on(Event::Write(CURR)).states(&[RUNNING]).given(Cond::Not(&LISTENS)).then(&[Effect::Enter(UNCHECKED)]),
    on(Event::Write(BNRY)).states(&[RUNNING]).given(Cond::Not(&LISTENS)).then(&[Effect::Enter(UNCHECKED)]),
    on(Event::Write(PSTART)).states(&[RUNNING]).given(LISTENS).checks(RING_CHECKS),
    on(Event::Write(PSTOP)).states(&[RUNNING]).given(LISTENS).checks(RING_CHECKS),
    on(Event::Write(CURR)).states(&[RUNNING]).given(LISTENS).checks(RING_CHECKS),
    on(Event::Write(BNRY)).states(&[RUNNING]).given(Cond::All(&[LISTENS, Cond::Not(&RING_SANE)]))
        .checks(&[Check::Refuse("BNRY must lie in the ring, or a page before it")]).about("once per packet: a value in the ring needs no decision"),
    on(Event::Write(RCR)).states(&[RUNNING, UNCHECKED]).given(LISTENS).checks(RING_CHECKS).then(&[Effect::Enter(CHECKED)]),
    on(Event::Write(RCR)).given(Cond::Set(RCR, PRO)).checks(&[Check::Allowed(Permission::Promiscuous)]),
    address!(PAR0, MAC0), address!(PAR1, MAC1), address!(PAR2, MAC2), address!(PAR3, MAC3), address!(PAR4, MAC4), address!(PAR5, MAC5),
    // The reset port, and causes from the device.
    on(Event::Read(RESET)).then(&[Effect::Reset, Effect::Answer(Expr::Const(0))]),
    on(Event::Cause(PTX | TXE)).states(&[TX_BUSY]).then(&[Effect::Look(CR)])
        .about("the cause may be that of an earlier frame: TXP says whether the card sends"),
    on(Event::Returned(CR)).given(Cond::Clear(CR, TXP)).then(&[Effect::Enter(TX_IDLE)]),
];

macro_rules! put {
    ($($reg:expr),*) => { &[$(Step::Write($reg, Expr::Reg($reg))),*] };
}

const LOW: u64 = 0xFF;
/// Stopped, bank 0, no remote transfer.
const HALT: Expr = Expr::Const(0x21);

const CONTEXT: Context = Context {
    settle: &[Step::Harvest, Step::Read(CR)],
    freeze: &[Step::Write(CR, HALT), Step::Await(ISR, RST, RST, 2_000), Step::Harvest],
    save: &[Step::Read(CURR), Step::SaveMemory],
    restore: &[
        Step::Reset,
        Step::Write(CR, HALT),
        Step::Write(RCR, Expr::Const(MON as u64)),
        Step::Write(DCR, Expr::Const(0x49)),
        Step::RestoreMemory,
        Step::Recheck,
        Step::All(put!(DCR, PSTART, PSTOP, BNRY, PAR0, PAR1, PAR2, PAR3, PAR4, PAR5, CURR)),
        Step::All(put!(MAR0, MAR1, MAR2, MAR3, MAR4, MAR5, MAR6, MAR7, TPSR, TBCR0, TBCR1, TCR)),
        Step::All(put!(RSAR0, RSAR1, RBCR0, RBCR1)),
        // Continues a remote transfer at its position.
        Step::If(
            MOVING,
            &[
                Step::Write(RSAR0, Expr::And(&AT_WRAPPED, LOW)),
                Step::Write(RSAR1, Expr::Shr(&Expr::And(&AT_WRAPPED, 0xFF00), 8)),
                Step::Write(RBCR0, Expr::And(&Expr::Reg(LEFT), LOW)),
                Step::Write(RBCR1, Expr::Shr(&Expr::And(&Expr::Reg(LEFT), 0xFF00), 8)),
            ],
        ),
        Step::Write(ISR, Expr::Const(0x7F)),
        Step::Write(IMR, Expr::Const(PHYSICAL_MASK as u64)),
        Step::Write(RCR, Expr::Reg(RCR)),
        // Last: the receiver runs from here on.
        Step::If(Cond::In(RDMA_READ), &[Step::Write(CR, Expr::Sum(&[CR_KEPT, Expr::Const(0x08)]))]),
        Step::If(Cond::In(RDMA_WRITE), &[Step::Write(CR, Expr::Sum(&[CR_KEPT, Expr::Const(0x10)]))]),
        Step::If(
            Cond::Any(&[Cond::In(RDMA_IDLE), Cond::In(RDMA_PROM)]),
            &[Step::Write(CR, Expr::Sum(&[CR_KEPT, Expr::Const(0x20)]))],
        ),
    ],
    // In the guest's bank: the monitor accesses the mask, and selects the guest's bank again at its next access.
    open: &[Step::Write(IMR, Expr::Const(0)), Step::Write(IMR, Expr::Reg(IMR))],
    // All registers are ports, and cards differ in which can be read back.
    learn: &[],
    memory: Some(Memory {
        from: MEMORY,
        to: MEMORY_END,
        page: 256,
        address: [RSAR0, RSAR1],
        count: [RBCR0, RBCR1],
        command: (CR, 0x09, 0x11, 0x21),
        data: DATA,
        current: CURR,
        live: &[
            Pages::Ring {
                from: Expr::Sum(&[Expr::Reg(BNRY), Expr::Const(1)]),
                to: Expr::Reg(CURR),
                start: Expr::Reg(PSTART),
                stop: Expr::Reg(PSTOP),
            },
            Pages::Written,
        ],
    }),
    pointers: None,
};

/// Bank and run bits of the guest's CR.
const CR_KEPT: Expr = Expr::And(&Expr::Reg(CR), 0xC3);
/// All causes but RDC, which the model derives.
const PHYSICAL_MASK: u32 = 0x3F;

/// The description.
pub static NE2000: Device = Device {
    name: "ne2000",
    title: "NE2000-PCI (RTL8029AS, DP8390 core)",
    source: "docs/design/specs/nics-rtl8139-ne2000-e1000.md; data sheets of RTL8029AS and DP8390",
    pci: Pci { vendor: 0x10EC, device: 0x8029, revision: 0, class: 0x02_0000, bus_master: BusMaster::Never },
    bars: &[Bar::Ports(32)],
    reset: &[
        Poke::Read(0x1F, 1),
        Poke::Write(0x1F, 1, 0),
        Poke::Write(0x00, 1, 0x21),
        Poke::Write(0x0F, 1, 0),
    ],
    // The PROM, a byte per word. Read while stopped, in word mode: 32 bytes from 0.
    power_on: &[],
    station: Station {
        before: &[
            Poke::Write(0x00, 1, 0x21),
            Poke::Write(0x0E, 1, 0x49),
            Poke::Write(0x08, 1, 0),
            Poke::Write(0x09, 1, 0),
            Poke::Write(0x0A, 1, 32),
            Poke::Write(0x0B, 1, 0),
            Poke::Write(0x00, 1, 0x0A),
        ],
        offset: 0x10,
        stride: 0,
        width: 1,
        after: &[Poke::Write(0x00, 1, 0x21), Poke::Write(0x07, 1, 0xFF)],
    },
    registers: REGISTERS,
    bank: Some(Bank { register: CR, shift: 6, mask: 3, keep: 0x03, set: 0x20, busy: ACTIVE }),
    identity: &[MAC0, MAC1, MAC2, MAC3, MAC4, MAC5],
    components: COMPONENTS,
    transitions: TRANSITIONS,
    windows: WINDOWS,
    interrupts: Interrupts {
        status: ISR,
        mask: IMR,
        line: 0x7F,
        derived: RDC | RST,
        physical_mask: PHYSICAL_MASK,
        set: None,
        latched: &[(TSR, PTX | TXE), (NCR, PTX | TXE), (RSR, PRX | RXE)],
        error: Some(TXE),
    },
    polled: Polled::NONE,
    reusable: &[TX_IDLE],
    context: CONTEXT,
    slices: &[&[]],
};
