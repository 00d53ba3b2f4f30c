//! RTL8139 in C mode, as Linux's 8139too drives it: four transmit descriptors and one receive ring. Registers hold
//! their addresses, so nothing can change between check and use.
//!
//! Hidden state: the next transmit descriptor, and the write position in the ring. Both can be read but not written.

use crate::describe::{
    Bar, BusMaster, Check, Class, Component, Cond, Context, Device, Direction, Effect, Event, Expr,
    Interrupts, Pci, Permission, Pointers, Poke, Polled, Reg, Register, Returns, Space, Standing, State,
    Station, Step, Store, Transition, Window, WindowId, on, register, states, table,
};

/// TSD: the host owns the descriptor.
pub const OWN: u32 = 0x2000;
/// TSD: transmit OK.
pub const TOK_BIT: u32 = 0x8000;
/// CR: the receive ring is empty.
pub const BUFE: u32 = 0x01;
/// CR: transmitter enable.
pub const TE: u32 = 0x04;
/// CR: receiver enable.
pub const RE: u32 = 0x08;
/// CR: reset.
pub const RST: u32 = 0x10;
/// ISR: receive OK.
pub const ROK: u32 = 0x0001;
/// ISR: transmit OK.
pub const TOK: u32 = 0x0004;
/// ISR: transmit error.
pub const TER: u32 = 0x0008;
/// ISR: receive buffer overflow.
pub const RXOVW: u32 = 0x0010;
/// TCR: loopback.
pub const LOOPBACK: u32 = 0x6_0000;
/// RCR: accept all unicast frames.
pub const AAP: u32 = 0x01;
/// RCR: accept the station address.
pub const APM: u32 = 0x02;
/// RCR: accept multicast.
pub const AM: u32 = 0x04;
/// RCR: accept broadcast.
pub const AB: u32 = 0x08;
/// RCR: a frame at the ring's end continues behind it.
pub const WRAP: u32 = 0x80;

table! { REGISTERS: Register => Reg {
    IDR0 = register("IDR0", 0x00).width(4).class(Class::Virtual, Class::Virtual).about("station address");
    IDR4 = register("IDR4", 0x04).width(4).class(Class::Virtual, Class::Virtual).about("station address, last two bytes");
    MAR0 = register("MAR0", 0x08).width(4).class(Class::Free, Class::Shadow).returns(Returns::Shadow).about("multicast filter");
    MAR4 = register("MAR4", 0x0C).width(4).class(Class::Free, Class::Shadow).returns(Returns::Shadow).about("multicast filter");
    TSD0 = tsd("TSD0", 0x10); TSD1 = tsd("TSD1", 0x14); TSD2 = tsd("TSD2", 0x18); TSD3 = tsd("TSD3", 0x1C);
    TSAD0 = tsad("TSAD0", 0x20); TSAD1 = tsad("TSAD1", 0x24); TSAD2 = tsad("TSAD2", 0x28); TSAD3 = tsad("TSAD3", 0x2C);
    RBSTART = register("RBSTART", 0x30).width(4).class(Class::Virtual, Class::Virtual).values(&[0x10_0000, 0x1F_C000, 0xFFFF_F000])
        .about("receive ring; the device gets the validated address only");
    ERBCR = register("ERBCR", 0x34).width(2).reads(Class::Free);
    ERSR = register("ERSR", 0x36).reads(Class::Free);
    CR = register("CR", 0x37).class(Class::Free, Class::Dma).store(Store::Plain(TE | RE)).returns(Returns::Bits(BUFE)).reset(BUFE)
        .values(&[0x00, TE, RE, TE | RE, RST]).about("enables, reset");
    CAPR = register("CAPR", 0x38).width(2).class(Class::Free, Class::Shadow).returns(Returns::Shadow).reset(0xFFF0)
        .about("how far the driver has read, less 10h");
    CBR = register("CBR", 0x3A).width(2).reads(Class::Free).returns(Returns::Within(Expr::Const(0), RING_BYTES)).about("write position");
    IMR = register("IMR", 0x3C).width(2).class(Class::Virtual, Class::Virtual).about("interrupt mask");
    ISR = register("ISR", 0x3E).width(2).class(Class::Virtual, Class::Virtual).store(Store::ClearOnes(0xE07F)).late().about("interrupt status");
    TCR = register("TCR", 0x40).width(4).class(Class::Free, Class::Check).returns(Returns::Bits(VERSION)).about("transmit configuration");
    RCR = register("RCR", 0x44).width(4).class(Class::Free, Class::Dma).returns(Returns::Shadow)
        .values(&[0x0000, 0x100F & !AAP, 0x1880 | AB, 0x1000 | AAP]).about("receive configuration: ring size, filter");
    TCTR = register("TCTR", 0x48).width(4).class(Class::Free, Class::Free).about("timer");
    MPC = register("MPC", 0x4C).width(4).class(Class::Free, Class::Free).about("missed frames");
    EECR = register("9346CR", 0x50).class(Class::Virtual, Class::Virtual).about("EEPROM, mode");
    CONFIG0 = register("CONFIG0", 0x51).class(Class::Virtual, Class::Virtual);
    CONFIG1 = register("CONFIG1", 0x52).class(Class::Virtual, Class::Virtual).reset(0x0C);
    TIMERINT = register("TimerInt", 0x54).width(4).class(Class::Virtual, Class::Virtual).about("never forwarded");
    MSR = register("MSR", 0x58).class(Class::Free, Class::Deny).about("link");
    CONFIG3 = register("CONFIG3", 0x59).class(Class::Virtual, Class::Virtual);
    CONFIG4 = register("CONFIG4", 0x5A).class(Class::Virtual, Class::Virtual);
    HLTCLK = register("HLTCLK", 0x5B).class(Class::Virtual, Class::Virtual);
    MULINT = register("MULINT", 0x5C).width(2).class(Class::Free, Class::Shadow).returns(Returns::Shadow);
    BMCR = register("BMCR", 0x62).width(2).class(Class::Free, Class::Deny).reset(0x3100);
    BMSR = register("BMSR", 0x64).width(2).class(Class::Free, Class::Deny).reset(0x782D).about("link up, autonegotiation complete");
    ANAR = register("ANAR", 0x66).width(2).class(Class::Free, Class::Deny).reset(0x01E1);
    ANLPAR = register("ANLPAR", 0x68).width(2).class(Class::Free, Class::Deny).reset(0x45E1);
    ANER = register("ANER", 0x6A).width(2).class(Class::Free, Class::Deny).reset(0x0001);
    CONFIG5 = register("CONFIG5", 0xD8).class(Class::Virtual, Class::Virtual);
    NEXT = register("next descriptor", 0).internal().values(&[0]).about("the descriptor that is sent next");
    UNMASKS = register("unmasking", 0).internal().about("the monitor looks whether frames wait, since the driver unmasks ROK");
    EE_LAST = register("EEPROM lines", 0).internal();
    EE_BITS = register("EEPROM command", 0).internal().width(2);
    EE_COUNT = register("EEPROM bits", 0).internal();
    EE_OUT = register("EEPROM word", 0).internal().width(4);
    MAC0 = mac("MAC0"); MAC1 = mac("MAC1"); MAC2 = mac("MAC2"); MAC3 = mac("MAC3"); MAC4 = mac("MAC4"); MAC5 = mac("MAC5");
} }

const fn tsd(name: &'static str, offset: u32) -> Register {
    register(name, offset)
        .width(4)
        .class(Class::Free, Class::Dma)
        .reset(OWN)
        .returns(Returns::Bits(u32::MAX))
        .becomes(0, OWN | TOK_BIT, TOK)
        .values(&[0x5EA, 0x1FFF, OWN])
        .about("transmit status; a write without OWN sends")
}

const fn tsad(name: &'static str, offset: u32) -> Register {
    register(name, offset)
        .width(4)
        .class(Class::Virtual, Class::Virtual)
        .values(&[0x10_0000, 0x1F_F000, 0xFFFF_F000])
        .about("address of the frame; the device gets the validated address only")
}

const fn mac(name: &'static str) -> Register {
    register(name, 0).internal().about("the guest's address")
}

states! { COMPONENTS {
    0 "re": RE_OFF = "off", RE_ON = "on";
    1 "tx0": TX0_IDLE = "idle", TX0_PENDING = "pending", TX0_KEPT = "kept";
    2 "tx1": TX1_IDLE = "idle", TX1_PENDING = "pending", TX1_KEPT = "kept";
    3 "tx2": TX2_IDLE = "idle", TX2_PENDING = "pending", TX2_KEPT = "kept";
    4 "tx3": TX3_IDLE = "idle", TX3_PENDING = "pending", TX3_KEPT = "kept";
    5 "txwin0": WIN0_NONE = "none", WIN0_WORST = "worst", WIN0_EACH = "each";
    6 "txwin1": WIN1_NONE = "none", WIN1_WORST = "worst", WIN1_EACH = "each";
    7 "txwin2": WIN2_NONE = "none", WIN2_WORST = "worst", WIN2_EACH = "each";
    8 "txwin3": WIN3_NONE = "none", WIN3_WORST = "worst", WIN3_EACH = "each";
} }

const fn frame(name: &'static str, tsd: &'static (Reg, Reg, [Cond; 2]), standing: (State, State)) -> Window {
    Window {
        name,
        space: Space::Host { bits: 32 },
        direction: Direction::DeviceReads,
        base: Expr::Reg(tsd.1),
        length: Expr::Bits(tsd.0, 0, 13),
        active: Cond::All(&tsd.2),
        // The largest size that the field can hold.
        standing: Some(Standing { length: Expr::Const(0x1FFF), granted: standing.0, each: standing.1 }),
        never: false,
    }
}

const SENDS0: (Reg, Reg, [Cond; 2]) = (TSD0, TSAD0, [Cond::Set(CR, TE), Cond::Clear(TSD0, OWN)]);
const SENDS1: (Reg, Reg, [Cond; 2]) = (TSD1, TSAD1, [Cond::Set(CR, TE), Cond::Clear(TSD1, OWN)]);
const SENDS2: (Reg, Reg, [Cond; 2]) = (TSD2, TSAD2, [Cond::Set(CR, TE), Cond::Clear(TSD2, OWN)]);
const SENDS3: (Reg, Reg, [Cond; 2]) = (TSD3, TSAD3, [Cond::Set(CR, TE), Cond::Clear(TSD3, OWN)]);

table! { WINDOWS: Window => WindowId {
    RING = Window {
        name: "receive ring",
        space: Space::Host { bits: 32 },
        direction: Direction::DeviceWrites,
        base: Expr::Reg(RBSTART),
        length: Expr::Sum(&[RING_BYTES, Expr::Const(16), Expr::If(&OVERHANGS, &Expr::Const(2048), &Expr::Const(0))]),
        active: Cond::Set(CR, RE),
        standing: None,
        never: false,
    };
    FRAME0 = frame("frame 0", &SENDS0, (WIN0_WORST, WIN0_EACH));
    FRAME1 = frame("frame 1", &SENDS1, (WIN1_WORST, WIN1_EACH));
    FRAME2 = frame("frame 2", &SENDS2, (WIN2_WORST, WIN2_EACH));
    FRAME3 = frame("frame 3", &SENDS3, (WIN3_WORST, WIN3_EACH));
} }

const RING_BYTES: Expr = Expr::Pick(
    &Expr::Bits(RCR, 11, 2),
    &[Expr::Const(0x2000), Expr::Const(0x4000), Expr::Const(0x8000), Expr::Const(0x1_0000)],
);
/// A frame may continue behind the ring's end, except with the largest ring.
const OVERHANGS: Cond = Cond::All(&[Cond::Set(RCR, WRAP), Cond::Not(&Cond::Is(RCR, 0x1800, 0x1800))]);
/// TCR: chip version.
pub const VERSION: u32 = 0x7CC0_0000;
#[rustfmt::skip] // A table: a row is a line.
const MAC_LOW: Expr = Expr::Sum(&[
    Expr::Reg(MAC0), Expr::Shl(&Expr::Reg(MAC1), 8), Expr::Shl(&Expr::Reg(MAC2), 16), Expr::Shl(&Expr::Reg(MAC3), 24),
]);
const MAC_HIGH: Expr = Expr::Sum(&[Expr::Reg(MAC4), Expr::Shl(&Expr::Reg(MAC5), 8)]);
/// Words 0 to 9 of the EEPROM. The last one stands for all higher ones.
#[rustfmt::skip] // A table: a row is a line.
const EEPROM: &[Expr] = &[
    Expr::Const(0x8129), Expr::Const(0x10EC), Expr::Const(0x8139), Expr::Const(0), Expr::Const(0), Expr::Const(0), Expr::Const(0),
    Expr::And(&MAC_LOW, 0xFFFF), Expr::Shr(&MAC_LOW, 16), MAC_HIGH, Expr::Const(0),
];
const EE_CS: u32 = 0x08;
const EE_SK: u32 = 0x04;
/// The EEPROM is selected, and its clock rises.
const EE_CLOCK: Cond =
    Cond::All(&[Cond::Is(EECR, 0xC0 | EE_CS | EE_SK, 0x80 | EE_CS | EE_SK), Cond::Clear(EE_LAST, EE_SK)]);
const EE_SHIFTED: Expr =
    Expr::Sum(&[Expr::Shl(&Expr::And(&Expr::Reg(EE_BITS), 0x7FFF), 1), Expr::Bits(EECR, 1, 1)]);
/// The write requests a reset.
const RESETS: Cond = Cond::Equal(Expr::And(&Expr::Written, RST as u64), Expr::Const(RST as u64));
const START_RECEIVER: &[Effect] = &[Effect::Enter(RE_ON), Effect::Device(RBSTART, Expr::DeviceBase(RING))];
const COUNT: Effect = Effect::Store(NEXT, Expr::And(&Expr::Sum(&[Expr::Reg(NEXT), Expr::Const(1)]), 3));

/// The transitions of descriptor n: its registers, its states, its window.
macro_rules! descriptor {
    ($tsd:ident $tsad:ident $window:ident: $idle:ident $pending:ident $kept:ident, $none:ident $worst:ident $each:ident) => {
        [
            on(Event::Write($tsad))
                .states(&[$pending])
                .checks(&[Check::Refuse("the address of a frame stays as it is while it is sent")]),
            on(Event::Write($tsad)).states(&[$idle, $kept]).checks(&[Check::Standing($window)]).then(&[
                Effect::Device(
                    $tsad,
                    Expr::If(&Cond::In($worst), &Expr::DeviceBase($window), &Expr::Const(0)),
                ),
            ]),
            on(Event::Write($tsd)).states(&[$pending]).checks(&[Check::Refuse("the frame is being sent")]),
            on(Event::Write($tsd))
                .given(Cond::All(&[Cond::Clear($tsd, OWN), Cond::Clear(CR, TE)]))
                .checks(&[Check::Refuse("the transmitter is off")]),
            on(Event::Write($tsd))
                .states(&[$idle, $kept, $none])
                .given(Cond::Clear($tsd, OWN))
                .checks(&[Check::Refuse("the frame has no address yet")]),
            on(Event::Write($tsd))
                .states(&[$idle, $kept, $worst])
                .given(Cond::Clear($tsd, OWN))
                .then(&[Effect::Enter($pending)])
                .about("any size is fine: no decision"),
            on(Event::Write($tsd))
                .states(&[$idle, $kept, $each])
                .given(Cond::Clear($tsd, OWN))
                .checks(&[Check::Window($window)])
                .then(&[Effect::Device($tsad, Expr::DeviceBase($window)), Effect::Enter($pending)]),
            on(Event::Read($tsd)).states(&[$kept]).then(&[Effect::Answer(Expr::Reg($tsd))]),
            on(Event::Returned($tsd))
                .states(&[$pending])
                .given(Cond::Set($tsd, OWN))
                .then(&[Effect::Enter($idle), COUNT]),
            on(Event::Write(CR))
                .states(&[$pending])
                .given(Cond::Clear(CR, TE))
                .then(&[Effect::Device($tsd, Expr::Const(OWN as u64)), Effect::Enter($idle)])
                .about("without a transmitter the frame is the driver's again"),
        ]
    };
}

const D0: [Transition; 10] =
    descriptor!(TSD0 TSAD0 FRAME0: TX0_IDLE TX0_PENDING TX0_KEPT, WIN0_NONE WIN0_WORST WIN0_EACH);
const D1: [Transition; 10] =
    descriptor!(TSD1 TSAD1 FRAME1: TX1_IDLE TX1_PENDING TX1_KEPT, WIN1_NONE WIN1_WORST WIN1_EACH);
const D2: [Transition; 10] =
    descriptor!(TSD2 TSAD2 FRAME2: TX2_IDLE TX2_PENDING TX2_KEPT, WIN2_NONE WIN2_WORST WIN2_EACH);
const D3: [Transition; 10] =
    descriptor!(TSD3 TSAD3 FRAME3: TX3_IDLE TX3_PENDING TX3_KEPT, WIN3_NONE WIN3_WORST WIN3_EACH);

#[rustfmt::skip] // A table: a row is a line.
const TRANSITIONS: &[Transition] = &[
    D0[0], D0[1], D0[2], D0[3], D0[4], D0[5], D0[6], D0[7], D0[8], D0[9], D1[0], D1[1], D1[2], D1[3], D1[4], D1[5], D1[6], D1[7], D1[8], D1[9],
    D2[0], D2[1], D2[2], D2[3], D2[4], D2[5], D2[6], D2[7], D2[8], D2[9], D3[0], D3[1], D3[2], D3[3], D3[4], D3[5], D3[6], D3[7], D3[8], D3[9],
    on(Event::Write(RBSTART)).states(&[RE_ON]).checks(&[Check::Refuse("the ring stays where it is while the receiver runs")]),
    on(Event::Write(RBSTART)).states(&[RE_OFF]).then(&[Effect::Forget(RING)]),
    on(Event::Write(CR)).given(RESETS).then(&[Effect::Reset]),
    on(Event::Write(CR)).states(&[RE_OFF]).given(Cond::All(&[Cond::Set(CR, RE), Cond::Not(&RESETS)])).checks(&[Check::Window(RING)]).then(START_RECEIVER)
        .about("with the ring size that is in force: drivers set it after this"),
    on(Event::Write(CR)).given(Cond::Clear(CR, RE)).then(&[Effect::Enter(RE_OFF)]),
    on(Event::Write(RCR)).states(&[RE_ON]).checks(&[Check::Window(RING)]).then(&[Effect::Device(RBSTART, Expr::DeviceBase(RING))])
        .about("the ring may have grown"),
    on(Event::Write(RCR)).given(Cond::Set(RCR, AAP)).checks(&[Check::Allowed(Permission::Promiscuous)]),
    on(Event::Write(TCR)).given(Cond::Set(TCR, LOOPBACK)).checks(&[Check::Allowed(Permission::Loopback)]),
    // Linux's 8139too acknowledges ROK after each frame, and stops its poll after 64 frames. Only the next frame would
    // report the others in the ring. A peer that waits for a response, or a wire that waits for room, sends none. So
    // the model raises ROK again.
    on(Event::Write(IMR)).given(Cond::Set(IMR, ROK)).then(&[Effect::Store(UNMASKS, Expr::Const(1)), Effect::Look(CR)]),
    on(Event::Returned(CR)).states(&[RE_ON]).given(Cond::All(&[Cond::Set(UNMASKS, 1), Cond::Clear(CR, BUFE)])).then(&[Effect::Raise(ROK)]),
    on(Event::Returned(CR)).then(&[Effect::Store(UNMASKS, Expr::Const(0))]),
    // The address: the guest's own, unless a permission allows others.
    on(Event::Write(IDR0)).given(Cond::Not(&Cond::Equal(Expr::Reg(IDR0), MAC_LOW))).checks(&[Check::Allowed(Permission::AnyAddress)]),
    on(Event::Write(IDR4)).given(Cond::Not(&Cond::Equal(Expr::And(&Expr::Reg(IDR4), 0xFFFF), MAC_HIGH)))
        .checks(&[Check::Allowed(Permission::AnyAddress)]),
    on(Event::Read(IDR0)).given(Cond::Is(IDR0, u32::MAX, 0)).then(&[Effect::Answer(MAC_LOW)]),
    on(Event::Read(IDR4)).given(Cond::Is(IDR4, u32::MAX, 0)).then(&[Effect::Answer(MAC_HIGH)]),
    // The EEPROM: a virtual 93C46 that supports only reads. A command is a one, two opcode bits, and six address bits.
    on(Event::Write(EECR)).given(EE_CLOCK).states(&[]).then(&[
        Effect::Store(EE_OUT, Expr::If(
            &Cond::Equal(Expr::Reg(EE_COUNT), Expr::Const(8)),
            &Expr::If(&Cond::Is(EE_BITS, 0xE0, 0xC0), &Expr::Pick(&Expr::And(&EE_SHIFTED, 0x3F), EEPROM), &Expr::Const(0xFFFF)),
            &Expr::And(&Expr::Shl(&Expr::Reg(EE_OUT), 1), 0x1_FFFF),
        )),
        Effect::Store(EE_BITS, EE_SHIFTED),
        // Zeros before the start bit don't count.
        Effect::Store(EE_COUNT, Expr::If(
            &Cond::Any(&[Cond::Equal(Expr::Reg(EE_BITS), Expr::Const(0)), Cond::Less(Expr::Const(15), Expr::Reg(EE_COUNT))]),
            &Expr::Reg(EE_COUNT),
            &Expr::Sum(&[Expr::Reg(EE_COUNT), Expr::Const(1)]),
        )),
    ]),
    on(Event::Write(EECR)).given(Cond::Clear(EECR, EE_CS))
        .then(&[Effect::Store(EE_BITS, Expr::Const(0)), Effect::Store(EE_COUNT, Expr::Const(0)), Effect::Store(EE_OUT, Expr::Const(0))]),
    on(Event::Write(EECR)).then(&[Effect::Store(EE_LAST, Expr::Reg(EECR))]),
    on(Event::Read(EECR)).then(&[Effect::Answer(Expr::Sum(&[Expr::And(&Expr::Reg(EECR), 0xFE), Expr::Bits(EE_OUT, 16, 1)]))]),
];

macro_rules! put {
    ($($reg:expr),*) => { &[$(Step::Write($reg, Expr::Reg($reg))),*] };
}
macro_rules! learn {
    ($($reg:expr),*) => { &[$(Step::Learn($reg)),*] };
}
macro_rules! sent {
    ($($reg:expr),*) => { &[$(Step::Await($reg, OWN, OWN, 2_000)),*] };
}

/// A locally administered address that no card has. The card has it in loopback.
const NOBODY: [u8; 6] = [0x02, 0xCA, 0x05, 0xE0, 0x39, 0x81];

const CONTEXT: Context = Context {
    // Only the frames in flight: the device no longer knows frames from before the last hand-off.
    settle: &[
        Step::Harvest,
        Step::If(Cond::In(TX0_PENDING), &[Step::Read(TSD0)]),
        Step::If(Cond::In(TX1_PENDING), &[Step::Read(TSD1)]),
        Step::If(Cond::In(TX2_PENDING), &[Step::Read(TSD2)]),
        Step::If(Cond::In(TX3_PENDING), &[Step::Read(TSD3)]),
    ],
    freeze: &[Step::Write(CR, Expr::And(&Expr::Reg(CR), TE as u64)), Step::Harvest],
    save: &[
        Step::Read(CBR),
        Step::Read(TCR),
        // From now on the guest reads the descriptor as the device last returned it.
        Step::If(Cond::In(TX0_IDLE), &[Step::Read(TSD0), Step::Enter(TX0_KEPT)]),
        Step::If(Cond::In(TX1_IDLE), &[Step::Read(TSD1), Step::Enter(TX1_KEPT)]),
        Step::If(Cond::In(TX2_IDLE), &[Step::Read(TSD2), Step::Enter(TX2_KEPT)]),
        Step::If(Cond::In(TX3_IDLE), &[Step::Read(TSD3), Step::Enter(TX3_KEPT)]),
        Step::Write(CR, Expr::Const(0)),
    ],
    restore: &[
        Step::Reset,
        Step::Write(EECR, Expr::Const(0xC0)),
        // Filters frames for the guest out until its ring is in place.
        Step::Write(
            IDR0,
            Expr::Const(u32::from_le_bytes([NOBODY[0], NOBODY[1], NOBODY[2], NOBODY[3]]) as u64),
        ),
        Step::Write(IDR4, Expr::Const(u32::from_le_bytes([NOBODY[4], NOBODY[5], 0, 0]) as u64)),
        Step::FastForward,
        Step::Recheck,
        Step::Write(RBSTART, Expr::DeviceBase(RING)),
        Step::Write(IDR0, Expr::If(&Cond::Is(IDR0, u32::MAX, 0), &MAC_LOW, &Expr::Reg(IDR0))),
        Step::Write(IDR4, Expr::If(&Cond::Is(IDR4, u32::MAX, 0), &MAC_HIGH, &Expr::Reg(IDR4))),
        Step::Write(EECR, Expr::Const(0)),
        Step::If(Cond::In(WIN0_WORST), &[Step::Write(TSAD0, Expr::DeviceBase(FRAME0))]),
        Step::If(Cond::In(WIN1_WORST), &[Step::Write(TSAD1, Expr::DeviceBase(FRAME1))]),
        Step::If(Cond::In(WIN2_WORST), &[Step::Write(TSAD2, Expr::DeviceBase(FRAME2))]),
        Step::If(Cond::In(WIN3_WORST), &[Step::Write(TSAD3, Expr::DeviceBase(FRAME3))]),
        Step::All(put!(MAR0, MAR4, CAPR, MULINT)),
        Step::Write(ISR, Expr::Const(0xE07F)),
        Step::Write(IMR, Expr::Const(PHYSICAL_MASK as u64)),
        // Last: from here on the device reads and writes memory.
        Step::Write(CR, Expr::Sum(&[Expr::And(&Expr::Reg(CR), RE as u64), Expr::Const(TE as u64)])),
        Step::Write(TCR, Expr::Reg(TCR)),
        Step::Write(CR, Expr::And(&Expr::Reg(CR), (TE | RE) as u64)),
    ],
    open: &[Step::Write(IMR, Expr::Const(0)), Step::Write(IMR, Expr::Reg(IMR))],
    learn: &[
        // A driver may have stopped the clock while its interface was down. The model never permits this.
        Step::Write(HLTCLK, Expr::Const(b'R' as u64)),
        Step::All(sent!(TSD0, TSD1, TSD2, TSD3)),
        Step::All(learn!(IDR0, IDR4, MAR0, MAR4, TSAD0, TSAD1, TSAD2, TSAD3, RBSTART, CAPR, MULINT, TCR)),
        // The ring's size before its start.
        Step::All(learn!(RCR, CR, IMR)),
    ],
    memory: None,
    pointers: Some(Pointers {
        position: CBR,
        next: NEXT,
        descriptors: &[(TSAD0, TSD0), (TSAD1, TSD1), (TSAD2, TSD2), (TSAD3, TSD3)],
        sent: OWN,
        ring: RING_BYTES,
        base: RBSTART,
        read: (CAPR, 16),
        config: (RCR, TCR),
        loopback: LOOPBACK | 0x0300_0600,
        accept: (AB, AAP | APM),
        station: NOBODY,
        enable: (CR, TE | RE),
        receives: RE,
        overhead: (8, 4),
        restart: RXOVW,
    }),
};

/// All causes except timer, early interrupts and system errors.
const PHYSICAL_MASK: u32 = 0x007F;

/// The description.
pub static RTL8139: Device = Device {
    name: "rtl8139",
    title: "RTL8139 in C mode",
    source: "docs/design/specs/nics-rtl8139-ne2000-e1000.md; data sheet of RTL8139C",
    pci: Pci {
        vendor: 0x10EC,
        device: 0x8139,
        revision: 0x10,
        class: 0x02_0000,
        bus_master: BusMaster::WhileValidated,
    },
    bars: &[Bar::Ports(256), Bar::Memory(256)],
    reset: &[Poke::Write(0x37, 1, RST), Poke::Await(0x37, 1, RST, 0), Poke::Write(0x3C, 2, 0)],
    power_on: &[],
    station: Station { before: &[], offset: 0, stride: 1, width: 1, after: &[] },
    registers: REGISTERS,
    bank: None,
    identity: &[MAC0, MAC1, MAC2, MAC3, MAC4, MAC5],
    components: COMPONENTS,
    transitions: TRANSITIONS,
    windows: WINDOWS,
    interrupts: Interrupts {
        status: ISR,
        mask: IMR,
        line: 0xE07F,
        derived: 0,
        physical_mask: PHYSICAL_MASK,
        set: None,
        latched: &[],
        error: Some(TER),
    },
    polled: Polled {
        read: &[TSD0, TSD1, TSD2, TSD3, CR],
        written: &[TSD0, TSD1, TSD2, TSD3, TSAD0, TSAD1, TSAD2, TSAD3, CAPR, IMR, ISR],
        // Sent and received, with and without errors, ring or FIFO full. Not the link.
        causes: 0x005F,
        // 8139too's mask during its poll: all causes that NAPI doesn't handle.
        masks: &[0xC02E],
        prompt: false,
        settles: &[],
        read_clears: None,
    },
    reusable: &[TX0_IDLE, TX0_KEPT, TX1_IDLE, TX1_KEPT, TX2_IDLE, TX2_KEPT, TX3_IDLE, TX3_KEPT],
    context: CONTEXT,
    // The descriptors are independent of each other.
    slices: &[
        &[TSD1, TSD2, TSD3, TSAD1, TSAD2, TSAD3],
        &[TSD0, TSD2, TSD3, TSAD0, TSAD2, TSAD3],
        &[TSD0, TSD1, TSD3, TSAD0, TSAD1, TSAD3],
        &[TSD0, TSD1, TSD2, TSAD0, TSAD1, TSAD2],
    ],
};
