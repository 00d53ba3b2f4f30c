//! What comes out: one line of JSON.

use core::fmt;

/// Most figures of a program's own.
const MAX_FIGURES: usize = 12;

/// A figure of a program's own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Figure {
    /// A whole number.
    Count(u64),
    /// A number; one that JSON hasn't (infinity, not a number) is shown as null.
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
            // Debug keeps the decimal point, and gives the shortest text that reads back the same.
            Self::Real(real) if real.is_finite() => write!(f, "{real:?}"),
            Self::Real(_) => f.write_str("null"),
            Self::Word(word) => write!(f, "\"{word}\""),
            Self::Flag(flag) => write!(f, "{flag}"),
        }
    }
}

/// What a program found out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Whether everything was as a serial computation says.
    pub verified: bool,
    /// What is counted in the measured part.
    pub event: &'static str,
    /// How many there were.
    pub events: u64,
    /// How long the measured part took, by vCPU 0's clock.
    pub nanoseconds: u64,
    figures: [Option<(&'static str, Figure)>; MAX_FIGURES],
}

impl Outcome {
    /// `events` times `event` in `nanoseconds`, not verified yet.
    pub fn new(event: &'static str, events: u64, nanoseconds: u64) -> Self {
        Self { verified: false, event, events, nanoseconds, figures: [None; MAX_FIGURES] }
    }

    /// With whether it is right.
    #[must_use]
    pub fn verified(mut self, verified: bool) -> Self {
        self.verified = verified;
        self
    }

    /// With a figure more.
    ///
    /// # Panics
    /// When there are too many.
    #[must_use]
    pub fn figure(mut self, name: &'static str, figure: Figure) -> Self {
        let Some(slot) = self.figures.iter_mut().find(|slot| slot.is_none()) else {
            panic!("There is no room for the figure {name}")
        };
        *slot = Some((name, figure));
        self
    }

    /// A figure.
    pub fn get(&self, name: &str) -> Option<Figure> {
        self.figures.iter().flatten().find(|(known, _)| *known == name).map(|(_, figure)| *figure)
    }

    /// As the line that is printed.
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
