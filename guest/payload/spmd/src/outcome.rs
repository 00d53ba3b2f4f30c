//! A program's result: one line of JSON.

use core::fmt;

/// Limit of a program's own figures.
const MAX_FIGURES: usize = 12;

/// A program's own figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Figure {
    /// An integer.
    Count(u64),
    /// A number; a value that JSON lacks (infinity, NaN) is printed as null.
    Real(f64),
    /// A word without quotation marks, backslashes and control characters.
    Word(&'static str),
    /// Yes or no.
    Flag(bool),
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count}"),
            // Debug keeps the decimal point, and yields the shortest text with the same value.
            Self::Real(real) if real.is_finite() => write!(f, "{real:?}"),
            Self::Real(_) => f.write_str("null"),
            Self::Word(word) => write!(f, "\"{word}\""),
            Self::Flag(flag) => write!(f, "{flag}"),
        }
    }
}

/// A program's result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Whether the result equals the serial computation's.
    pub verified: bool,
    /// Name of the counted event in the measured part.
    pub event: &'static str,
    /// Number of events.
    pub events: u64,
    /// Duration of the measured part in nanoseconds, by vCPU 0's clock.
    pub nanoseconds: u64,
    figures: [Option<(&'static str, Figure)>; MAX_FIGURES],
}

impl Outcome {
    /// Creates a result of `events` times `event` in `nanoseconds`, not verified yet.
    pub fn new(event: &'static str, events: u64, nanoseconds: u64) -> Self {
        Self { verified: false, event, events, nanoseconds, figures: [None; MAX_FIGURES] }
    }

    /// Sets whether the result is correct.
    #[must_use]
    pub fn verified(mut self, verified: bool) -> Self {
        self.verified = verified;
        self
    }

    /// Adds a figure.
    ///
    /// # Panics
    /// There are too many figures.
    #[must_use]
    pub fn figure(mut self, name: &'static str, figure: Figure) -> Self {
        let Some(slot) = self.figures.iter_mut().find(|slot| slot.is_none()) else {
            panic!("There is no room for the figure {name}")
        };
        *slot = Some((name, figure));
        self
    }

    /// Returns a figure.
    pub fn get(&self, name: &str) -> Option<Figure> {
        self.figures.iter().flatten().find(|(known, _)| *known == name).map(|(_, figure)| *figure)
    }

    /// Returns the line to print.
    pub fn line(&self, program: &'static str, vcpus: usize, nodes: u32) -> impl fmt::Display {
        struct Line(Outcome, &'static str, usize, u32);
        impl fmt::Display for Line {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let Self(outcome, program, vcpus, nodes) = self;
                write!(f, "{{\"program\":\"{program}\",\"vcpus\":{vcpus},\"nodes\":{nodes},")?;
                write!(f, "\"verified\":{},\"ns\":{},", outcome.verified, outcome.nanoseconds)?;
                write!(f, "\"event\":\"{}\",\"events\":{}", outcome.event, outcome.events)?;
                for (name, figure) in outcome.figures.iter().flatten() {
                    write!(f, ",\"{name}\":{figure}")?;
                }
                f.write_str("}")
            }
        }
        Line(*self, program, vcpus, nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::{Figure, Outcome};

    #[test]
    fn the_line_is_json() {
        let outcome = Outcome::new("step", 3, 9)
            .verified(true)
            .figure("sum", Figure::Real(1.0))
            .figure("bad", Figure::Real(f64::NAN))
            .figure("kind", Figure::Word("ticket"))
            .figure("count", Figure::Count(2));
        assert_eq!(
            outcome.line("x", 2, 1).to_string(),
            r#"{"program":"x","vcpus":2,"nodes":1,"verified":true,"ns":9,"event":"step","events":3,"sum":1.0,"bad":null,"kind":"ticket","count":2}"#
        );
    }
}
