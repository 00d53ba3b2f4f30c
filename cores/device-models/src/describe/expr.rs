//! Numbers and conditions over registers, as data that can be evaluated, printed and searched.

use std::fmt;

use super::{Reg, State, WindowId};

/// Source of an expression's values.
pub trait Values {
    /// The value of a register.
    fn register(&self, reg: Reg) -> u32;
    /// Returns the state numbers, one per component.
    fn states(&self) -> &[u8];
    /// Returns the current access's size in bytes, or 0 without an access.
    fn access_size(&self) -> u32 {
        0
    }
    /// Returns the current access's offset in its BAR, or 0 without an access.
    fn access_offset(&self) -> u32 {
        0
    }
    /// Returns the value being written, including bits that the register doesn't store.
    fn written(&self) -> u32 {
        0
    }
    /// Returns a validated window's base in the device's addresses, or 0 if it isn't validated.
    fn device_base(&self, _window: WindowId) -> u64 {
        0
    }
}

/// A number. Arithmetic has 64 bits and saturates, since guests choose the operands.
#[derive(Debug, Clone, Copy)]
pub enum Expr {
    /// A constant.
    Const(u64),
    /// A register.
    Reg(Reg),
    /// A bit field of a register: lowest bit, number of bits.
    Bits(Reg, u8, u8),
    /// The sum.
    Sum(&'static [Expr]),
    /// The difference, or 0 if it would be negative.
    Minus(&'static Expr, &'static Expr),
    /// Shifted left.
    Shl(&'static Expr, u8),
    /// Shifted right.
    Shr(&'static Expr, u8),
    /// Bitwise AND with the constant.
    And(&'static Expr, u64),
    /// The bits of the first that aren't set in the second.
    Without(&'static Expr, &'static Expr),
    /// The list entry at this index, or the last entry if the index is too large.
    Pick(&'static Expr, &'static [Expr]),
    /// The first number if the condition holds, else the second.
    If(&'static Cond, &'static Expr, &'static Expr),
    /// The value being written, including bits that the register doesn't store.
    Written,
    /// Bytes of the access.
    AccessSize,
    /// Offset of the access in its BAR, which selects a word of a table.
    Offset,
    /// Base of a validated window in the device's addresses.
    DeviceBase(WindowId),
}

impl Expr {
    /// Evaluates the expression.
    pub fn value(&self, from: &dyn Values) -> u64 {
        match *self {
            Self::Const(number) => number,
            Self::Reg(reg) => u64::from(from.register(reg)),
            Self::Bits(reg, shift, bits) => (u64::from(from.register(reg)) >> shift) & ((1 << bits) - 1),
            Self::Sum(terms) => terms.iter().fold(0u64, |sum, term| sum.saturating_add(term.value(from))),
            Self::Minus(left, right) => left.value(from).saturating_sub(right.value(from)),
            Self::Shl(number, by) => number.value(from).saturating_mul(1 << by),
            Self::Shr(number, by) => number.value(from) >> by,
            Self::And(number, mask) => number.value(from) & mask,
            Self::Without(bits, others) => bits.value(from) & !others.value(from),
            Self::Pick(number, table) => {
                let at = usize::try_from(number.value(from)).unwrap_or(usize::MAX);
                table[at.min(table.len() - 1)].value(from)
            }
            Self::If(condition, yes, no) => if condition.holds(from) { yes } else { no }.value(from),
            Self::Written => u64::from(from.written()),
            Self::AccessSize => u64::from(from.access_size()),
            Self::Offset => u64::from(from.access_offset()),
            Self::DeviceBase(window) => from.device_base(window),
        }
    }

    /// Calls `seen` for each register that the expression reads.
    pub fn registers(&self, seen: &mut dyn FnMut(Reg)) {
        match self {
            Self::Reg(reg) | Self::Bits(reg, ..) => seen(*reg),
            Self::Sum(terms) => terms.iter().for_each(|term| term.registers(seen)),
            Self::Minus(left, right) | Self::Without(left, right) => {
                left.registers(seen);
                right.registers(seen);
            }
            Self::Shl(number, _) | Self::Shr(number, _) | Self::And(number, _) => number.registers(seen),
            Self::Pick(number, table) => {
                number.registers(seen);
                table.iter().for_each(|entry| entry.registers(seen));
            }
            Self::If(condition, yes, no) => {
                condition.registers(seen);
                yes.registers(seen);
                no.registers(seen);
            }
            Self::Const(_) | Self::Written | Self::AccessSize | Self::Offset | Self::DeviceBase(_) => {}
        }
    }
}

/// A condition.
#[derive(Debug, Clone, Copy)]
pub enum Cond {
    /// Holds in every state.
    Always,
    /// Holds in no state.
    Never,
    /// At least one of these bits of the register is set.
    Set(Reg, u32),
    /// None of these bits of the register is set.
    Clear(Reg, u32),
    /// These bits (mask) of the register have this value.
    Is(Reg, u32, u32),
    /// Both are equal.
    Equal(Expr, Expr),
    /// The first is less than the second.
    Less(Expr, Expr),
    /// The first is at most the second.
    AtMost(Expr, Expr),
    /// All hold.
    All(&'static [Cond]),
    /// At least one holds.
    Any(&'static [Cond]),
    /// The condition doesn't hold.
    Not(&'static Cond),
    /// The component is in this state.
    In(State),
}

impl Cond {
    /// Evaluates the condition.
    pub fn holds(&self, from: &dyn Values) -> bool {
        match *self {
            Self::Always => true,
            Self::Never => false,
            Self::Set(reg, mask) => from.register(reg) & mask != 0,
            Self::Clear(reg, mask) => from.register(reg) & mask == 0,
            Self::Is(reg, mask, value) => from.register(reg) & mask == value,
            Self::Equal(ref left, ref right) => left.value(from) == right.value(from),
            Self::Less(ref left, ref right) => left.value(from) < right.value(from),
            Self::AtMost(ref left, ref right) => left.value(from) <= right.value(from),
            Self::All(all) => all.iter().all(|one| one.holds(from)),
            Self::Any(any) => any.iter().any(|one| one.holds(from)),
            Self::Not(other) => !other.holds(from),
            Self::In(state) => from.states()[usize::from(state.component)] == state.number,
        }
    }

    /// Calls `seen` for each register that the condition reads.
    pub fn registers(&self, seen: &mut dyn FnMut(Reg)) {
        match self {
            Self::Set(reg, _) | Self::Clear(reg, _) | Self::Is(reg, ..) => seen(*reg),
            Self::Equal(left, right) | Self::Less(left, right) | Self::AtMost(left, right) => {
                left.registers(seen);
                right.registers(seen);
            }
            Self::All(all) | Self::Any(all) => all.iter().for_each(|one| one.registers(seen)),
            Self::Not(other) => other.registers(seen),
            Self::Always | Self::Never | Self::In(_) => {}
        }
    }
}

/// Text of expressions and conditions with the device's names.
pub(crate) struct Named<'a, T>(pub &'a super::Device, pub &'a T);

impl fmt::Display for Named<'_, Expr> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.0;
        let name = |reg: Reg| device.register(reg).name;
        match *self.1 {
            Expr::Const(number) if number < 10 => write!(out, "{number}"),
            Expr::Const(number) => write!(out, "{number:X}h"),
            Expr::Reg(reg) => write!(out, "{}", name(reg)),
            Expr::Bits(reg, shift, bits) => write!(out, "{}[{}:{shift}]", name(reg), shift + bits - 1),
            Expr::Sum(terms) => {
                for (at, term) in terms.iter().enumerate() {
                    write!(out, "{}{}", if at == 0 { "" } else { " + " }, Named(device, term))?;
                }
                Ok(())
            }
            Expr::Minus(left, right) => write!(out, "({} - {})", Named(device, left), Named(device, right)),
            Expr::Shl(number, by) => write!(out, "({} << {by})", Named(device, number)),
            Expr::Shr(number, by) => write!(out, "({} >> {by})", Named(device, number)),
            Expr::And(number, mask) => write!(out, "({} & {mask:X}h)", Named(device, number)),
            Expr::Without(bits, others) => {
                write!(out, "({} without {})", Named(device, bits), Named(device, others))
            }
            Expr::Pick(number, table) => {
                write!(out, "entry {} of (", Named(device, number))?;
                for (at, entry) in table.iter().enumerate() {
                    write!(out, "{}{}", if at == 0 { "" } else { ", " }, Named(device, entry))?;
                }
                write!(out, ")")
            }
            Expr::If(condition, yes, no) => {
                write!(out, "({} ? {} : {})", Named(device, condition), Named(device, yes), Named(device, no))
            }
            Expr::Written => write!(out, "written"),
            Expr::AccessSize => write!(out, "size"),
            Expr::Offset => write!(out, "offset"),
            Expr::DeviceBase(window) => write!(out, "translated({})", device.windows[window.index()].name),
        }
    }
}

impl fmt::Display for Named<'_, Cond> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.0;
        let name = |reg: Reg| device.register(reg).name;
        let list = |out: &mut fmt::Formatter<'_>, all: &[Cond], word: &str| {
            for (at, one) in all.iter().enumerate() {
                write!(out, "{}{}", if at == 0 { "" } else { word }, Named(device, one))?;
            }
            Ok(())
        };
        match *self.1 {
            Cond::Always => write!(out, "always"),
            Cond::Never => write!(out, "never"),
            Cond::Set(reg, mask) => write!(out, "{}.{mask:X}h set", name(reg)),
            Cond::Clear(reg, mask) => write!(out, "{}.{mask:X}h clear", name(reg)),
            Cond::Is(reg, mask, value) => write!(out, "{}.{mask:X}h = {value:X}h", name(reg)),
            Cond::Equal(ref left, ref right) => {
                write!(out, "{} = {}", Named(device, left), Named(device, right))
            }
            Cond::Less(ref left, ref right) => {
                write!(out, "{} < {}", Named(device, left), Named(device, right))
            }
            Cond::AtMost(ref left, ref right) => {
                write!(out, "{} <= {}", Named(device, left), Named(device, right))
            }
            Cond::All(all) => list(out, all, " and "),
            Cond::Any(any) => {
                write!(out, "(")?;
                list(out, any, " or ")?;
                write!(out, ")")
            }
            Cond::Not(other) => write!(out, "not ({})", Named(device, other)),
            Cond::In(state) => write!(out, "{}", device.state_name(state)),
        }
    }
}
