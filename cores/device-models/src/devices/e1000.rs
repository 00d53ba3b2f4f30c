//! e1000, as the 82540EM: descriptor rings in memory (Intel's manual of the PCI/PCI-X family).
//!
//! Descriptors, which the guest can change at any time, contain the addresses that the device accesses. So only an
//! IOMMU confines the device to the guest's memory ([`Space::Guest`]). The rings are validated windows, and the buffers
//! are all of that memory. Without an IOMMU the receiver and the transmitter don't start. `vpio::sharing` copies the
//! rings behind this description, and so needs no IOMMU.
//!
//! Not in the context: statistics, and the last context descriptor, which no register exposes. Linux writes one before
//! each frame that needs it. A driver that doesn't would need a hand-off with the head at a context descriptor.

use crate::describe::{
    Bar, BusMaster, Check, Class, Component, Cond, Context, Device, Direction, Effect, Event, Expr,
    Interrupts, Pci, Permission, Poke, Polled, Reg, Register, Returns, Space, State, Station, Step, Store,
    Transition, Window, WindowId, on, register, states, table,
};

/// CTRL: reset.
pub const RST: u32 = 1 << 26;
/// CTRL: reset of the PHY while it is set.
pub const PHY_RST: u32 = 1 << 31;
/// RCTL, TCTL: enable.
pub const EN: u32 = 0x02;
/// RCTL: unicast promiscuous.
pub const UPE: u32 = 0x08;
/// RCTL: loopback mode.
pub const LBM: u32 = 0xC0;
/// ICR: transmit descriptors were written back.
pub const TXDW: u32 = 0x01;
/// ICR: receiver timer interrupt.
pub const RXT0: u32 = 0x80;

table! { REGISTERS: Register => Reg {
    CTRL = wide("CTRL", 0x0).store(Store::Plain(!RST)).values(&[RST]).about("link, reset");
    STATUS = wide("STATUS", 0x8).reads(Class::Free);
    EECD = wide("EECD", 0x10).class(Class::Virtual, Class::Virtual).store(Store::Plain(0x77)).about("EEPROM, bit by bit");
    EERD = wide("EERD", 0x14).class(Class::Deny, Class::Deny);
    CTRL_EXT = wide("CTRL_EXT", 0x18).class(Class::Free, Class::Check);
    MDIC = wide("MDIC", 0x20).class(Class::Free, Class::Check).about("PHY");
    FCAL = wide("FCAL", 0x28); FCAH = wide("FCAH", 0x2C); FCT = wide("FCT", 0x30); VET = wide("VET", 0x38);
    ICR = wide("ICR", 0xC0).class(Class::Virtual, Class::Virtual).store(Store::ClearOnes(u32::MAX)).about("interrupt causes, a read clears");
    ITR = wide("ITR", 0xC4).late().about("least time between interrupts");
    ICS = wide("ICS", 0xC8).writes(Class::Virtual).about("sets causes");
    IMS = wide("IMS", 0xD0).class(Class::Virtual, Class::Virtual).store(Store::SetOnes(0x1_FFFF)).about("interrupt mask, sets");
    IMC = wide("IMC", 0xD8).writes(Class::Virtual).late().about("interrupt mask, clears");
    RCTL = wide("RCTL", 0x100).class(Class::Free, Class::Dma).returns(Returns::Shadow).values(&[0, EN, EN | UPE]).about("receiver");
    FCTTV = wide("FCTTV", 0x170);
    TCTL = wide("TCTL", 0x400).class(Class::Free, Class::Dma).returns(Returns::Shadow).values(&[0, EN]).about("transmitter");
    TIPG = wide("TIPG", 0x410); AIT = wide("AIT", 0x458); LEDCTL = wide("LEDCTL", 0xE00); PBA = wide("PBA", 0x1000);
    FCRTL = wide("FCRTL", 0x2160); FCRTH = wide("FCRTH", 0x2168);
    RDBAL = base("RDBAL", 0x2800).aliases(&[0x110]).values(&[0x10_0000, 0x1F_FF00, 0xFFFF_F000]).about("receive ring; the device gets validated addresses only");
    RDBAH = base("RDBAH", 0x2804).aliases(&[0x114]).values(&[0, 1]);
    RDLEN = base("RDLEN", 0x2808).aliases(&[0x118]).store(Store::Plain(0xF_FF80)).values(&[0, 0x80, 0x1000]).about("its bytes");
    RDH = head("RDH", 0x2810).aliases(&[0x120]).follows(RDT, RXT0).about("where the device is");
    RDT = tail("RDT", 0x2818).aliases(&[0x128]).late().about("where the driver is");
    RDTR = wide("RDTR", 0x2820).aliases(&[0x108]); RXDCTL = wide("RXDCTL", 0x2828); RADV = wide("RADV", 0x282C);
    RSRPD = wide("RSRPD", 0x2C00);
    TDBAL = base("TDBAL", 0x3800).aliases(&[0x420]).values(&[0x10_0000, 0x1F_FF00, 0xFFFF_F000]).about("transmit ring");
    TDBAH = base("TDBAH", 0x3804).aliases(&[0x424]).values(&[0, 1]);
    TDLEN = base("TDLEN", 0x3808).aliases(&[0x428]).store(Store::Plain(0xF_FF80)).values(&[0, 0x80, 0x1000]).about("its bytes");
    TDH = head("TDH", 0x3810).aliases(&[0x430]).follows(TDT, TXDW).about("where the device is");
    TDT = tail("TDT", 0x3818).aliases(&[0x438]).about("where the driver is: the device sends what lies before");
    TIDV = wide("TIDV", 0x3820).aliases(&[0x440]); TXDCTL = wide("TXDCTL", 0x3828); TADV = wide("TADV", 0x382C);
    TSPMT = wide("TSPMT", 0x3830);
    STATISTICS = register("statistics", 0x4000).port(0x128).reads(Class::Free).about("most are cleared by a read");
    RXCSUM = wide("RXCSUM", 0x5000);
    MTA = register("MTA", 0x5200).table(0x200).aliases(&[0x200]).about("multicast filter");
    RAL0 = wide("RAL0", 0x5400).aliases(&[0x40]).class(Class::Free, Class::Check).returns(Returns::Shadow).about("station address");
    RAH0 = wide("RAH0", 0x5404).aliases(&[0x44]).class(Class::Free, Class::Check).returns(Returns::Shadow).about("station address, valid");
    RA = register("RA", 0x5408).table(0x78).aliases(&[0x48]).class(Class::Free, Class::Check).about("other addresses");
    VFTA = register("VFTA", 0x5600).table(0x200).aliases(&[0x600]).about("VLAN filter");
    WUC = wide("WUC", 0x5800).class(Class::Deny, Class::Deny); WUFC = wide("WUFC", 0x5808).class(Class::Deny, Class::Deny);
    WUS = wide("WUS", 0x5810).class(Class::Deny, Class::Deny);
    MANC = wide("MANC", 0x5820).class(Class::Virtual, Class::Virtual);
    EE_LAST = register("EEPROM lines", 0).internal();
    EE_BITS = register("EEPROM command", 0).internal().width(2);
    EE_COUNT = register("EEPROM bits", 0).internal();
    EE_OUT = register("EEPROM word", 0).internal().width(4);
    MAC0 = mac("MAC0"); MAC1 = mac("MAC1"); MAC2 = mac("MAC2"); MAC3 = mac("MAC3"); MAC4 = mac("MAC4"); MAC5 = mac("MAC5");
} }

const fn wide(name: &'static str, offset: u32) -> Register {
    register(name, offset).width(4)
}

const fn base(name: &'static str, offset: u32) -> Register {
    wide(name, offset).class(Class::Virtual, Class::Virtual)
}

const fn head(name: &'static str, offset: u32) -> Register {
    wide(name, offset)
        .class(Class::Free, Class::Check)
        .store(Store::Plain(0xFFFF))
        .returns(Returns::Bits(0xFFFF))
        .values(&[0, 0xFFFF])
}

const fn tail(name: &'static str, offset: u32) -> Register {
    wide(name, offset)
        .class(Class::Free, Class::Dma)
        .store(Store::Plain(0xFFFF))
        .returns(Returns::Shadow)
        .values(&[0, 9, 0xFFFF])
}

const fn mac(name: &'static str) -> Register {
    register(name, 0).internal().about("the guest's address")
}

states! { COMPONENTS {
    0 "rx": RX_OFF = "off", RX_ON = "on";
    1 "tx": TX_OFF = "off", TX_ON = "on";
    2 "queue": IDLE = "idle", BUSY = "busy";
} }

/// Base, length, head and tail of a ring.
type Ring = (&'static Expr, Reg, &'static Cond);

const fn ring(name: &'static str, of: Ring, active: Cond) -> Window {
    Window {
        name,
        space: Space::Host { bits: 64 },
        // The device writes descriptors back.
        direction: Direction::DeviceWrites,
        base: *of.0,
        length: Expr::If(of.2, LENGTHS[if of.1.0 == RDLEN.0 { 0 } else { 1 }], &ENDLESS),
        active,
        standing: None,
        never: false,
    }
}

const fn buffers(name: &'static str, direction: Direction, active: Cond) -> Window {
    Window {
        name,
        space: Space::Guest,
        direction,
        base: Expr::Const(0),
        length: Expr::Const(0),
        active,
        standing: None,
        never: false,
    }
}

table! { WINDOWS: Window => WindowId {
    RX_RING = ring("receive ring", (&RX_BASE, RDLEN, &RX_SANE), Cond::Set(RCTL, EN));
    TX_RING = ring("transmit ring", (&TX_BASE, TDLEN, &TX_SANE), Cond::Set(TCTL, EN));
    RX_BUFFERS = buffers("receive buffers", Direction::DeviceWrites, Cond::Set(RCTL, EN));
    TX_BUFFERS = buffers("frames to send", Direction::DeviceReads, Cond::Set(TCTL, EN));
} }

const LENGTHS: [&Expr; 2] = [&Expr::Reg(RDLEN), &Expr::Reg(TDLEN)];
/// Length for a device whose head or tail is outside of its ring: it continues through memory.
const ENDLESS: Expr = Expr::Const(0x100_0000);
const RX_BASE: Expr = Expr::Sum(&[Expr::Reg(RDBAL), Expr::Shl(&Expr::Reg(RDBAH), 32)]);
const TX_BASE: Expr = Expr::Sum(&[Expr::Reg(TDBAL), Expr::Shl(&Expr::Reg(TDBAH), 32)]);
const RX_TAIL_SANE: Cond = Cond::Less(Expr::Shl(&Expr::Reg(RDT), 4), Expr::Reg(RDLEN));
const TX_TAIL_SANE: Cond = Cond::Less(Expr::Shl(&Expr::Reg(TDT), 4), Expr::Reg(TDLEN));
const RX_SANE: Cond = Cond::All(&[RX_TAIL_SANE, Cond::Less(Expr::Shl(&Expr::Reg(RDH), 4), Expr::Reg(RDLEN))]);
const TX_SANE: Cond = Cond::All(&[TX_TAIL_SANE, Cond::Less(Expr::Shl(&Expr::Reg(TDH), 4), Expr::Reg(TDLEN))]);
const LOW: u64 = 0xFFFF_FFFF;
const STAYS: Check = Check::Refuse("a ring stays as it is while its engine runs");
const TAIL: Check = Check::Refuse("the tail must lie in the ring");
const START_RX: &[Effect] = &[
    Effect::Enter(RX_ON),
    Effect::Device(RDBAL, Expr::And(&Expr::DeviceBase(RX_RING), LOW)),
    Effect::Device(RDBAH, Expr::Shr(&Expr::DeviceBase(RX_RING), 32)),
    Effect::Device(RDLEN, Expr::Reg(RDLEN)),
];
const START_TX: &[Effect] = &[
    Effect::Enter(TX_ON),
    Effect::Enter(BUSY),
    Effect::Device(TDBAL, Expr::And(&Expr::DeviceBase(TX_RING), LOW)),
    Effect::Device(TDBAH, Expr::Shr(&Expr::DeviceBase(TX_RING), 32)),
    Effect::Device(TDLEN, Expr::Reg(TDLEN)),
];
#[rustfmt::skip] // A table: a row is a line.
const MAC_LOW: Expr = Expr::Sum(&[
    Expr::Reg(MAC0), Expr::Shl(&Expr::Reg(MAC1), 8), Expr::Shl(&Expr::Reg(MAC2), 16), Expr::Shl(&Expr::Reg(MAC3), 24),
]);
const MAC_HIGH: Expr = Expr::Sum(&[Expr::Reg(MAC4), Expr::Shl(&Expr::Reg(MAC5), 8)]);
/// Words 0 to 2 of the EEPROM. The others are zero, except the last: all 64 sum up to BABAh.
const WORDS: &[Expr] = &[Expr::And(&MAC_LOW, 0xFFFF), Expr::Shr(&MAC_LOW, 16), MAC_HIGH, Expr::Const(0)];
const CHECKSUM: Expr =
    Expr::And(&Expr::Minus(&Expr::Const(0x5_BABA), &Expr::Sum(&[WORDS[0], WORDS[1], WORDS[2]])), 0xFFFF);
const EE_SK: u32 = 0x01;
const EE_CS: u32 = 0x02;
const EE_REQ: u32 = 0x40;
/// The EEPROM is selected, and its clock rises.
const EE_CLOCK: Cond =
    Cond::All(&[Cond::Is(EECD, EE_CS | EE_SK, EE_CS | EE_SK), Cond::Clear(EE_LAST, EE_SK)]);
const EE_SHIFTED: Expr =
    Expr::Sum(&[Expr::Shl(&Expr::And(&Expr::Reg(EE_BITS), 0x7FFF), 1), Expr::Bits(EECD, 2, 1)]);
const EE_WORD: Expr = Expr::If(
    &Cond::Equal(Expr::And(&EE_SHIFTED, 0x3F), Expr::Const(0x3F)),
    &CHECKSUM,
    &Expr::Pick(&Expr::And(&EE_SHIFTED, 0x3F), WORDS),
);
const WHOLE_WORD: Cond = Cond::All(&[
    Cond::Equal(Expr::AccessSize, Expr::Const(4)),
    Cond::Equal(Expr::And(&Expr::Offset, 3), Expr::Const(0)),
]);
/// The first word of an address that is neither zero nor multicast. (If it is zero, the second word can yield
/// 00:00:00:00:xx:xx, which no station has.)
const NOT_A_GROUP: Cond = Cond::All(&[
    Cond::Equal(Expr::And(&Expr::Offset, 4), Expr::Const(0)),
    Cond::Not(&Cond::Equal(Expr::Written, Expr::Const(0))),
    Cond::Equal(Expr::And(&Expr::Written, 1), Expr::Const(0)),
]);
/// MDIC operation: a read; a write of a register; a write with all of these bits set.
const PHY_OPERATION: u32 = 0x0C00_0000;
const PHY_READS: Cond = Cond::Is(MDIC, PHY_OPERATION, 0x0800_0000);
const PHY_WRITES: Cond = Cond::Is(MDIC, PHY_OPERATION, PHY_WRITE);
const PHY_WRITE: u32 = 0x0400_0000;
/// MDIC: the only PHY.
const PHY_ADDRESS: u32 = 1 << 21;
const fn phy_gets(register: u32, bits: u32) -> Cond {
    Cond::Is(MDIC, PHY_OPERATION | 0x1F << 16 | bits, PHY_WRITE | register << 16 | bits)
}
const PHY_CONTROL: Cond = phy_gets(0, 0);
const PHY_ADVERTISES: Cond = phy_gets(4, 0);
const PHY_GIGABIT: Cond = phy_gets(9, 0);
const PHY_MARVELL: Cond = phy_gets(16, 0);
const PHY_MARVELL_MORE: Cond = phy_gets(20, 0);
/// PHY registers by which drivers set the link up: control, advertisement, 1000BASE-T control, and two of Marvell's
/// own.
const PHY_LINK: Cond = Cond::Any(&[PHY_CONTROL, PHY_ADVERTISES, PHY_GIGABIT, PHY_MARVELL, PHY_MARVELL_MORE]);
/// Bits of the PHY's control register: power down, isolate, loopback. Of Marvell's register 20: line loopback.
const PHY_POWER_DOWN: Cond = phy_gets(0, 0x0800);
const PHY_ISOLATES: Cond = phy_gets(0, 0x0400);
const PHY_LOOPBACK: Cond = phy_gets(0, 0x4000);
const PHY_LINE_LOOPBACK: Cond = phy_gets(20, 0x4000);
/// Test mode bits of the PHY's 1000BASE-T control register.
const PHY_TEST: u32 = 0xE000;
/// CTRL_EXT bits that must stay off: pin directions, speed check, EEPROM reset (which gives the card its own address),
/// speed bypass, link mode.
const CTRL_EXT_OFF: u32 = 0x00C0_BF00;

#[rustfmt::skip] // A table: a row is a line.
const TRANSITIONS: &[Transition] = &[
    on(Event::Write(CTRL)).given(Cond::Equal(Expr::And(&Expr::Written, RST as u64), Expr::Const(RST as u64))).then(&[Effect::Reset]),
    // The receiver. Its ring is checked when it starts. The registers that the check used can't change until it stops.
    on(Event::Write(RCTL)).states(&[RX_OFF]).given(Cond::Set(RCTL, EN)).checks(&[
        Check::Rule("RDH and RDT lie in the ring", RX_SANE), Check::Window(RX_RING), Check::Window(RX_BUFFERS),
    ]).then(START_RX),
    on(Event::Write(RCTL)).given(Cond::Clear(RCTL, EN)).then(&[Effect::Enter(RX_OFF)]),
    on(Event::Write(RCTL)).given(Cond::Set(RCTL, UPE)).checks(&[Check::Allowed(Permission::Promiscuous)]),
    on(Event::Write(RCTL)).given(Cond::Set(RCTL, LBM)).checks(&[Check::Allowed(Permission::Loopback)]),
    on(Event::Write(RDBAL)).states(&[RX_ON]).checks(&[STAYS]),
    on(Event::Write(RDBAH)).states(&[RX_ON]).checks(&[STAYS]),
    on(Event::Write(RDLEN)).states(&[RX_ON]).checks(&[STAYS]),
    on(Event::Write(RDH)).states(&[RX_ON]).checks(&[STAYS]),
    on(Event::Write(RDT)).states(&[RX_ON]).given(Cond::Not(&RX_TAIL_SANE)).checks(&[TAIL]).about("a tail in the ring needs no decision"),
    on(Event::Write(RDLEN)).states(&[RX_OFF]).then(&[Effect::Look(RDH)]).about("where the device stopped in a ring of another length"),
    // The transmitter.
    on(Event::Write(TCTL)).states(&[TX_OFF]).given(Cond::Set(TCTL, EN)).checks(&[
        Check::Rule("TDH and TDT lie in the ring", TX_SANE), Check::Window(TX_RING), Check::Window(TX_BUFFERS),
    ]).then(START_TX),
    on(Event::Write(TCTL)).given(Cond::Clear(TCTL, EN)).then(&[Effect::Enter(TX_OFF), Effect::Enter(IDLE)]),
    on(Event::Write(TDBAL)).states(&[TX_ON]).checks(&[STAYS]),
    on(Event::Write(TDBAH)).states(&[TX_ON]).checks(&[STAYS]),
    on(Event::Write(TDLEN)).states(&[TX_ON]).checks(&[STAYS]),
    on(Event::Write(TDH)).states(&[TX_ON]).checks(&[STAYS]),
    on(Event::Write(TDT)).states(&[TX_ON]).given(Cond::Not(&TX_TAIL_SANE)).checks(&[TAIL]),
    on(Event::Write(TDT)).states(&[TX_ON]).given(TX_TAIL_SANE).then(&[Effect::Enter(BUSY)]),
    on(Event::Write(TDLEN)).states(&[TX_OFF]).then(&[Effect::Look(TDH)]),
    on(Event::Returned(TDH)).given(Cond::Equal(Expr::Reg(TDH), Expr::Reg(TDT))).then(&[Effect::Enter(IDLE)]),
    // Interrupts.
    on(Event::Read(ICR)).then(&[Effect::Answer(Expr::Reg(ICR)), Effect::Store(ICR, Expr::Const(0))]),
    on(Event::Write(ICS)).then(&[Effect::Store(ICR, Expr::Sum(&[Expr::Without(&Expr::Reg(ICR), &Expr::Written), Expr::Written]))]),
    on(Event::Write(IMC)).then(&[Effect::Store(IMS, Expr::Without(&Expr::Reg(IMS), &Expr::Written))]),
    // The PHY stays on, and the address is the guest's own.
    on(Event::Write(MDIC)).given(Cond::Not(&Cond::Any(&[PHY_READS, PHY_WRITES]))).checks(&[Check::Refuse("it reads or writes a register of the PHY")]),
    on(Event::Write(MDIC)).given(Cond::All(&[PHY_WRITES, Cond::Not(&PHY_LINK)]))
        .checks(&[Check::Refuse("of the PHY's registers only 0, 4, 9, 16 and 20 may be written")]),
    on(Event::Write(MDIC)).given(Cond::Any(&[PHY_POWER_DOWN, PHY_ISOLATES])).checks(&[Check::Refuse("the PHY stays on")]),
    on(Event::Write(MDIC)).given(Cond::Any(&[PHY_LOOPBACK, PHY_LINE_LOOPBACK]))
        .checks(&[Check::Allowed(Permission::Loopback)]),
    on(Event::Write(MDIC)).given(Cond::All(&[PHY_GIGABIT, Cond::Set(MDIC, PHY_TEST)])).checks(&[Check::Refuse("the PHY sends no test patterns")]),
    on(Event::Write(CTRL_EXT)).given(Cond::Set(CTRL_EXT, CTRL_EXT_OFF))
        .checks(&[Check::Refuse("pins, speed and kind of link are the card's, and it isn't reset from its EEPROM")]),
    on(Event::Write(RAL0)).given(Cond::Not(&Cond::Equal(Expr::Reg(RAL0), MAC_LOW))).checks(&[Check::Allowed(Permission::AnyAddress)]),
    on(Event::Write(RAH0)).given(Cond::Not(&Cond::Equal(Expr::And(&Expr::Reg(RAH0), 0xFFFF), MAC_HIGH)))
        .checks(&[Check::Allowed(Permission::AnyAddress)]),
    on(Event::Write(RA)).given(NOT_A_GROUP).checks(&[Check::Allowed(Permission::AnyAddress)])
        .about("drivers keep groups here; the first word of a pair says whether it is one"),
    on(Event::Write(RA)).given(Cond::Not(&WHOLE_WORD)).checks(&[Check::Refuse("an address is written by whole words")]),
    // The EEPROM: a virtual 93C46 that supports only reads.
    on(Event::Write(EECD)).given(EE_CLOCK).then(&[
        Effect::Store(EE_OUT, Expr::If(
            &Cond::Equal(Expr::Reg(EE_COUNT), Expr::Const(8)),
            &Expr::If(&Cond::Is(EE_BITS, 0xE0, 0xC0), &EE_WORD, &Expr::Const(0xFFFF)),
            &Expr::And(&Expr::Shl(&Expr::Reg(EE_OUT), 1), 0x1_FFFF),
        )),
        Effect::Store(EE_BITS, EE_SHIFTED),
        Effect::Store(EE_COUNT, Expr::If(
            &Cond::Any(&[Cond::Equal(Expr::Reg(EE_BITS), Expr::Const(0)), Cond::Less(Expr::Const(15), Expr::Reg(EE_COUNT))]),
            &Expr::Reg(EE_COUNT),
            &Expr::Sum(&[Expr::Reg(EE_COUNT), Expr::Const(1)]),
        )),
    ]),
    on(Event::Write(EECD)).given(Cond::Clear(EECD, EE_CS))
        .then(&[Effect::Store(EE_BITS, Expr::Const(0)), Effect::Store(EE_COUNT, Expr::Const(0)), Effect::Store(EE_OUT, Expr::Const(0))]),
    on(Event::Write(EECD)).then(&[Effect::Store(EE_LAST, Expr::And(&Expr::Reg(EECD), 0xFF))]),
    on(Event::Read(EECD)).then(&[Effect::Answer(Expr::Sum(&[
        Expr::And(&Expr::Reg(EECD), 0x77), Expr::Const(0x100), Expr::Shl(&Expr::Bits(EE_OUT, 16, 1), 3),
        Expr::If(&Cond::Set(EECD, EE_REQ), &Expr::Const(0x80), &Expr::Const(0)),
    ]))]),
];

macro_rules! put {
    ($($reg:expr),*) => { &[$(Step::Write($reg, Expr::Reg($reg))),*] };
}
macro_rules! learn {
    ($($reg:expr),*) => { &[$(Step::Learn($reg)),*] };
}

const CONTEXT: Context = Context {
    settle: &[Step::Harvest, Step::Read(TDH)],
    freeze: &[Step::Write(RCTL, Expr::Const(0)), Step::Write(TCTL, Expr::Const(0)), Step::Harvest],
    save: &[Step::Read(RDH), Step::Read(TDH)],
    restore: &[
        Step::Reset,
        Step::Write(RAL0, MAC_LOW),
        Step::Write(RAH0, Expr::Sum(&[MAC_HIGH, Expr::Const(0x8000_0000)])),
        Step::Recheck,
        Step::Table(MTA),
        Step::Table(RA),
        Step::Table(VFTA),
        Step::All(put!(CTRL_EXT, FCAL, FCAH, FCT, FCTTV, VET, ITR, TIPG, AIT, PBA, FCRTL, FCRTH, RXCSUM)),
        Step::All(put!(RDTR, RADV, RXDCTL, TIDV, TADV, TXDCTL)),
        Step::If(
            Cond::In(RX_ON),
            &[
                Step::Write(RDBAL, Expr::And(&Expr::DeviceBase(RX_RING), LOW)),
                Step::Write(RDLEN, Expr::Reg(RDLEN)),
            ],
        ),
        Step::If(Cond::In(RX_ON), &[Step::Write(RDBAH, Expr::Shr(&Expr::DeviceBase(RX_RING), 32))]),
        Step::If(
            Cond::In(TX_ON),
            &[
                Step::Write(TDBAL, Expr::And(&Expr::DeviceBase(TX_RING), LOW)),
                Step::Write(TDLEN, Expr::Reg(TDLEN)),
            ],
        ),
        Step::If(Cond::In(TX_ON), &[Step::Write(TDBAH, Expr::Shr(&Expr::DeviceBase(TX_RING), 32))]),
        Step::All(put!(RDH, RDT, TDH, TDT, CTRL)),
        Step::Write(IMS, Expr::Const(PHYSICAL_MASK as u64)),
        // Last: from here on the device reads and writes memory.
        Step::All(put!(RCTL, TCTL)),
    ],
    open: &[Step::Write(IMC, Expr::Const(u32::MAX as u64)), Step::Write(IMS, Expr::Reg(IMS))],
    learn: &[
        Step::LearnTable(MTA),
        Step::LearnTable(RA),
        Step::LearnTable(VFTA),
        Step::All(learn!(RAL0, RAH0, CTRL, CTRL_EXT, FCAL, FCAH, FCT, FCTTV, VET, ITR, TIPG, AIT, PBA)),
        Step::All(learn!(FCRTL, FCRTH, RXCSUM, RDTR, RADV, RXDCTL, TIDV, TADV, TXDCTL, IMS)),
        Step::All(learn!(RDBAL, RDBAH, RDLEN, RDH, RDT, TDBAL, TDBAH, TDLEN, TDH, TDT)),
        Step::All(learn!(RCTL, TCTL)),
    ],
    memory: None,
    pointers: None,
};

/// Transmit and receive causes, link, MDIO.
const PHYSICAL_MASK: u32 = 0x02DF;

/// The description.
pub static E1000: Device = Device {
    name: "e1000",
    title: "e1000 (82540EM)",
    source: "docs/design/specs/nics-rtl8139-ne2000-e1000.md; manual of the PCI/PCI-X family",
    pci: Pci {
        vendor: 0x8086,
        device: 0x100E,
        revision: 2,
        class: 0x02_0000,
        bus_master: BusMaster::WhileValidated,
    },
    // The second one accesses every register by index and data.
    bars: &[Bar::Memory(0x2_0000), Bar::Hidden],
    reset: &[
        Poke::Write(0xD8, 4, u32::MAX),
        Poke::Write(0x0, 4, RST),
        Poke::Await(0x0, 4, RST, 0),
        Poke::Write(0xD8, 4, u32::MAX),
    ],
    power_on: &[
        // The PHY has a reset of its own, which must last 10 ms. A read over the bus takes at least 1 µs.
        Poke::Write(0x0, 4, PHY_RST),
        Poke::Hold(0x8, 4, 10_000),
        Poke::Write(0x0, 4, 0),
        Poke::Hold(0x8, 4, 10_000),
        // For a PHY that ignores it: its own reset by registers, with a new negotiation.
        Poke::Write(0x20, 4, PHY_WRITE | PHY_ADDRESS | 0x9140),
        Poke::Await(0x20, 4, 1 << 28, 1 << 28),
        Poke::Write(0x0, 4, RST),
        Poke::Await(0x0, 4, RST, 0),
        Poke::Write(0xD8, 4, u32::MAX),
    ],
    station: Station { before: &[], offset: 0x5400, stride: 1, width: 4, after: &[] },
    registers: REGISTERS,
    bank: None,
    identity: &[MAC0, MAC1, MAC2, MAC3, MAC4, MAC5],
    components: COMPONENTS,
    transitions: TRANSITIONS,
    windows: WINDOWS,
    interrupts: Interrupts {
        status: ICR,
        mask: IMS,
        line: 0x1_FFFF,
        derived: 0,
        physical_mask: PHYSICAL_MASK,
        set: Some(ICS),
        latched: &[],
        // No bit makes drivers recover by themselves.
        error: None,
    },
    polled: Polled {
        read: &[],
        written: &[TDT, RDT, IMS, IMC, ICS, ICR, ITR],
        // Sent, received, receive descriptors low, overrun. Not link or PHY.
        causes: 0x00D3,
        // The mask that Linux's driver writes.
        masks: &[0x009D],
        prompt: true,
        settles: &[(MDIC, 1 << 28)],
        read_clears: Some(IMC),
    },
    reusable: &[IDLE],
    context: CONTEXT,
    // The engines are independent of each other.
    slices: &[&[TCTL, TDBAL, TDBAH, TDLEN, TDH, TDT], &[RCTL, RDBAL, RDBAH, RDLEN, RDH, RDT]],
};
