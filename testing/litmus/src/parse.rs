//! Parses the .litmus format, as far as tests for x86 need it.
//!
//! ```text
//! X86 SB                            architecture and name
//! "store buffering"                 comments: in quotation marks, or Key=Value
//! { x=0; uint64_t y=0; 0:ECX=5; }   unnamed locations and registers are 0
//!  P0          | P1          ;
//!  MOV [x],$1  | MOV [y],$1  ;
//!  MOV EAX,[y] | MOV EAX,[x] ;
//! exists (0:EAX=0 /\ 1:EAX=0)       also ~exists and forall
//! ```
//! Instructions: `MOV`, `ADD`, `SUB`, `AND`, `OR`, `XOR`, `INC`, `DEC` (with memory also after `LOCK`), `XCHG`, `LOCK XADD`,
//! `LOCK CMPXCHG`, `MFENCE`. Registers: EAX, EBX, ECX, EDX, ESI, EDI and their 64-bit forms, which make an access 64 bits wide; so does
//! `qword` before a location.

use crate::test::{Condition, Instruction, Observed, Operand, Operation, Register, Test, Width};
use payload_litmus::{MOST_LOCATIONS, MOST_OBSERVED, MOST_THREADS};

/// An invalid test.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Line {line} of the litmus test can't be read: {what}")]
pub struct ParseError {
    /// Line number, from 1.
    pub line: usize,
    /// The problem, with its words.
    pub what: String,
}

type Result<T> = std::result::Result<T, String>;

impl Test {
    /// Parses a file's text.
    ///
    /// # Errors
    /// It isn't a test, or exceeds the runner's limits: 4 threads, 4 locations, 4 loaded registers per thread.
    pub fn parse(text: &str) -> std::result::Result<Self, ParseError> {
        let mut parser = Parser {
            test: Self {
                name: String::new(),
                locations: Vec::new(),
                initial: Vec::new(),
                registers: Vec::new(),
                threads: Vec::new(),
                condition: Condition::True,
            },
            stage: Stage::Name,
            condition: String::new(),
        };
        let mut last = 0;
        for (number, line) in (1..).zip(text.lines()) {
            last = number;
            parser.line(line.trim()).map_err(|what| ParseError { line: number, what })?;
        }
        parser.end().map_err(|what| ParseError { line: last, what })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Name,
    Comments,
    Initial,
    Header,
    Program,
    Condition,
}

struct Parser {
    test: Test,
    stage: Stage,
    condition: String,
}

impl Parser {
    fn line(&mut self, line: &str) -> Result<()> {
        if line.is_empty() {
            return Ok(());
        }
        match self.stage {
            Stage::Name => {
                let Some((architecture, name)) = line.split_once(char::is_whitespace) else {
                    return Err(format!("{line:?} should be an architecture and a name, such as X86 SB"));
                };
                if !["X86", "X86_64"].contains(&architecture.to_ascii_uppercase().as_str()) {
                    return Err(format!("the architecture is {architecture}, and has to be X86 or X86_64"));
                }
                name.trim().clone_into(&mut self.test.name);
                self.stage = Stage::Comments;
                Ok(())
            }
            Stage::Comments if !line.starts_with('{') => {
                if line.starts_with('"') || line.contains('=') {
                    return Ok(());
                }
                Err(format!(
                    "{line:?} is neither a comment in quotation marks nor Key=Value nor the initial state in braces"
                ))
            }
            Stage::Comments | Stage::Initial => {
                self.stage = Stage::Initial;
                let inner = line.trim_start_matches('{');
                let (inner, ends) = inner.split_once('}').map_or((inner, false), |(inner, _)| (inner, true));
                for item in inner.split(';').map(str::trim).filter(|item| !item.is_empty()) {
                    self.initial(item)?;
                }
                if ends {
                    self.stage = Stage::Header;
                }
                Ok(())
            }
            Stage::Header => {
                let names: Vec<&str> = line.trim_end_matches(';').split('|').map(str::trim).collect();
                let right = names.iter().enumerate().all(|(index, name)| *name == format!("P{index}"));
                if !right || names.len() > MOST_THREADS {
                    return Err(format!(
                        "{line:?} should name the threads: P0 | P1 ; and so on, {MOST_THREADS} at most"
                    ));
                }
                self.test.threads = vec![Vec::new(); names.len()];
                self.stage = Stage::Program;
                Ok(())
            }
            Stage::Program => {
                if ["exists", "~exists", "forall", "locations"].iter().any(|word| line.starts_with(word)) {
                    self.stage = Stage::Condition;
                    return self.line(line);
                }
                let cells: Vec<&str> = line.trim_end_matches(';').split('|').map(str::trim).collect();
                if cells.len() != self.test.threads.len() {
                    let (cells, threads) = (cells.len(), self.test.threads.len());
                    return Err(format!("there are {cells} columns and {threads} threads"));
                }
                for (thread, cell) in cells.iter().enumerate().filter(|(_, cell)| !cell.is_empty()) {
                    let instruction = self.instruction(cell)?;
                    self.test.threads[thread].push(instruction);
                }
                Ok(())
            }
            Stage::Condition => {
                // All locations are observed anyway.
                if !line.starts_with("locations") {
                    self.condition.push(' ');
                    self.condition.push_str(line);
                }
                Ok(())
            }
        }
    }

    fn location(&mut self, name: &str) -> Result<usize> {
        let proper = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if name.is_empty() || !name.chars().all(proper) || name.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(format!("{name:?} is no name of a location"));
        }
        if let Some(known) = self.test.locations.iter().position(|known| known == name) {
            return Ok(known);
        }
        if self.test.locations.len() == MOST_LOCATIONS {
            return Err(format!("{name} is one location more than the {MOST_LOCATIONS} there may be"));
        }
        self.test.locations.push(name.to_owned());
        self.test.initial.push(0);
        Ok(self.test.locations.len() - 1)
    }

    fn initial(&mut self, item: &str) -> Result<()> {
        let (target, value) =
            item.split_once('=').map_or((item, "0"), |(target, value)| (target.trim(), value.trim()));
        let value = number(value)?;
        if let Some((thread, name)) = target.split_once(':') {
            let (thread, (register, width)) = (thread_number(thread)?, register(name)?);
            self.test.registers.push((thread, register, width.cut(value)));
            return Ok(());
        }
        let name = target.rsplit(char::is_whitespace).next().unwrap_or(target);
        let location = self.location(name)?;
        self.test.initial[location] = value;
        Ok(())
    }

    /// Parses `[x]`, `qword [x]`: the location, and the width if given.
    fn memory(&mut self, text: &str) -> Result<Option<(usize, Option<Width>)>> {
        let lower = text.to_ascii_lowercase();
        let (width, rest) = if lower.starts_with("qword") {
            (Some(Width::Quad), text[5..].trim())
        } else if lower.starts_with("dword") {
            (Some(Width::Double), text[5..].trim())
        } else {
            (None, text)
        };
        match rest.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(name) => Ok(Some((self.location(name.trim())?, width))),
            None if width.is_some() => Err(format!("{text:?} needs a location in brackets")),
            None => Ok(None),
        }
    }

    fn instruction(&mut self, text: &str) -> Result<Instruction> {
        let upper = text.to_ascii_uppercase();
        let (locked, rest) = match upper.strip_prefix("LOCK") {
            Some(rest) if rest.starts_with([' ', ';']) => (true, text[5..].trim()),
            _ => (false, text),
        };
        let (name, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let name = name.to_ascii_uppercase();
        let operands: Vec<&str> =
            operands.split(',').map(str::trim).filter(|operand| !operand.is_empty()).collect();
        let unknown = || format!("the instruction {text:?} isn't one that is known here");
        let modifies = |name: &str| {
            Some(match name {
                "ADD" | "INC" => Operation::Add,
                "SUB" | "DEC" => Operation::Sub,
                "AND" => Operation::And,
                "OR" => Operation::Or,
                "XOR" => Operation::Xor,
                _ => return None,
            })
        };
        match (name.as_str(), operands.as_slice()) {
            ("MFENCE", []) if !locked => Ok(Instruction::Fence),
            ("INC" | "DEC", [target]) => {
                let operation = modifies(&name).ok_or_else(unknown)?;
                let Some((location, width)) = self.memory(target)? else { return Err(unknown()) };
                let (width, operand) = (width.unwrap_or(Width::Double), Operand::Constant(1));
                Ok(Instruction::Modify { locked, width, operation, location, operand })
            }
            ("XCHG" | "XADD" | "CMPXCHG", [first, second]) => {
                let (location, other) = match (self.memory(first)?, self.memory(second)?) {
                    (Some((location, _)), None) => (location, second),
                    // Only xchg permits either order.
                    (None, Some((location, _))) if name == "XCHG" => (location, first),
                    _ => return Err(unknown()),
                };
                let (register, width) = register(other)?;
                match name.as_str() {
                    "XCHG" => Ok(Instruction::Exchange(width, location, register)),
                    "XADD" if locked => Ok(Instruction::ExchangeAdd(width, location, register)),
                    "CMPXCHG" if locked => Ok(Instruction::CompareExchange(width, location, register)),
                    _ => Err(format!("{text:?} is known with LOCK only")),
                }
            }
            (_, [target, source]) => {
                let operation = modifies(&name).filter(|_| !["INC", "DEC"].contains(&name.as_str()));
                if operation.is_none() && name != "MOV" {
                    return Err(unknown());
                }
                let from = self.memory(source)?;
                if let Some((location, said)) = self.memory(target)? {
                    let (operand, width) = operand(source)?;
                    let width = width.or(said).unwrap_or(Width::Double);
                    check_constant(operand, width)?;
                    return match operation {
                        None if locked => Err(unknown()),
                        None => Ok(Instruction::Store(width, location, operand)),
                        Some(operation) => {
                            Ok(Instruction::Modify { locked, width, operation, location, operand })
                        }
                    };
                }
                let (target, width) = register(target)?;
                match (from, operation) {
                    _ if locked => Err(unknown()),
                    (Some((location, _)), None) => Ok(Instruction::Load(width, target, location)),
                    (Some(_), Some(_)) => Err(unknown()),
                    (None, operation) => {
                        let (operand, other) = operand(source)?;
                        if other.is_some_and(|other| other != width) {
                            return Err(format!("the registers of {text:?} have different widths"));
                        }
                        check_constant(operand, width)?;
                        Ok(match operation {
                            None => Instruction::Move(width, target, operand),
                            Some(operation) => Instruction::Compute(width, operation, target, operand),
                        })
                    }
                }
            }
            _ => Err(unknown()),
        }
    }

    fn end(mut self) -> Result<Test> {
        if self.stage != Stage::Condition {
            return Err("the test ends before its condition (exists, ~exists or forall)".to_owned());
        }
        if let Some(wrong) =
            self.test.threads.iter().find(|thread| Test::loaded(thread).len() > MOST_OBSERVED)
        {
            let count = Test::loaded(wrong).len();
            return Err(format!("a thread loads {count} registers; {MOST_OBSERVED} are possible"));
        }
        let text = std::mem::take(&mut self.condition);
        let text = text.trim();
        let (word, rest) =
            text.split_once([' ', '(']).map_or((text, ""), |(word, _)| (word, &text[word.len()..]));
        let mut tokens = tokens(rest)?;
        tokens.reverse();
        let condition = self.either(&mut tokens)?;
        if let Some(left) = tokens.last() {
            return Err(format!("the condition goes on with {left:?} where it should end"));
        }
        self.test.condition = match word {
            "exists" | "~exists" => condition,
            "forall" => Condition::Not(Box::new(condition)),
            _ => return Err(format!("{word:?} is no condition; there are exists, ~exists and forall")),
        };
        Ok(self.test)
    }

    fn either(&mut self, tokens: &mut Vec<String>) -> Result<Condition> {
        let mut left = self.both(tokens)?;
        while tokens.last().is_some_and(|token| token == "\\/") {
            tokens.pop();
            left = Condition::Or(Box::new(left), Box::new(self.both(tokens)?));
        }
        Ok(left)
    }

    fn both(&mut self, tokens: &mut Vec<String>) -> Result<Condition> {
        let mut left = self.single(tokens)?;
        while tokens.last().is_some_and(|token| token == "/\\") {
            tokens.pop();
            left = Condition::And(Box::new(left), Box::new(self.single(tokens)?));
        }
        Ok(left)
    }

    fn single(&mut self, tokens: &mut Vec<String>) -> Result<Condition> {
        let token = tokens.pop().ok_or("the condition ends too early")?;
        match token.as_str() {
            "(" => {
                // Nesting is bounded, so that no text exhausts the stack.
                if tokens.len() > 1000 {
                    return Err("the condition is too long".to_owned());
                }
                let inner = self.either(tokens)?;
                match tokens.pop().as_deref() {
                    Some(")") => Ok(inner),
                    other => Err(format!("there should be a ) instead of {other:?}")),
                }
            }
            "~" => Ok(Condition::Not(Box::new(self.single(tokens)?))),
            "true" => Ok(Condition::True),
            atom => {
                let (target, value) =
                    atom.split_once('=').ok_or_else(|| format!("{atom:?} should be name=value"))?;
                let value = number(value)?;
                let observed = match target.split_once(':') {
                    Some((thread, name)) => {
                        let (thread, register) = (thread_number(thread)?, register(name)?.0);
                        let instructions = self.test.threads.get(thread).map_or(&[][..], Vec::as_slice);
                        if !Test::loaded(instructions).contains(&register) {
                            return Err(format!("{target} isn't loaded from memory by that thread"));
                        }
                        Observed::Register(thread, register)
                    }
                    None => {
                        let name = target.trim_matches(['[', ']']);
                        let known = self.test.locations.iter().position(|known| known == name);
                        Observed::Location(known.ok_or_else(|| format!("there is no location {name:?}"))?)
                    }
                };
                Ok(Condition::Is(observed, value))
            }
        }
    }
}

/// Splits a condition into words.
fn tokens(text: &str) -> Result<Vec<String>> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '(' | ')' | '~' => 1,
            '/' | '\\' if rest.starts_with("/\\") || rest.starts_with("\\/") => 2,
            _ => rest.find(|c: char| c.is_whitespace() || "()~/\\".contains(c)).unwrap_or(rest.len()),
        };
        if length == 0 {
            return Err(format!("the condition has {first:?}, which means nothing there"));
        }
        tokens.push(rest[..length].to_owned());
        rest = rest[length..].trim_start();
    }
    Ok(tokens)
}

fn thread_number(text: &str) -> Result<usize> {
    let thread: Option<usize> = text.trim().trim_start_matches('P').parse().ok();
    thread.filter(|thread| *thread < MOST_THREADS).ok_or_else(|| format!("{text:?} is no number of a thread"))
}

fn register(text: &str) -> Result<(Register, Width)> {
    Register::named(text.trim()).ok_or_else(|| format!("{text:?} is no register that tests may use"))
}

fn number(text: &str) -> Result<u64> {
    let text = text.trim();
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    number.ok_or_else(|| format!("{text:?} is no number"))
}

/// Parses a constant or a register with its width.
fn operand(text: &str) -> Result<(Operand, Option<Width>)> {
    if let Some(constant) = text.strip_prefix('$') {
        let value = number(constant)?;
        let value =
            u32::try_from(value).map_err(|_| format!("the constant {value} doesn't fit into 32 bits"))?;
        return Ok((Operand::Constant(value), None));
    }
    let (register, width) = register(text)?;
    Ok((Operand::Register(register), Some(width)))
}

/// 64-bit instructions sign-extend, which is never the meaning of a large constant.
fn check_constant(operand: Operand, width: Width) -> Result<()> {
    match operand {
        Operand::Constant(value) if width == Width::Quad && value > i32::MAX.cast_unsigned() => {
            Err(format!("the constant {value} would be taken as negative by a 64-bit instruction"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SB: &str = "X86 SB\n\"store buffering\"\nCom=Fr Fr\n{ x=0;\n uint64_t y=7; 1:ECX=0x10; }\n P0 | P1 ;\n MOV [x],$1 | LOCK XADD [y],ECX ;\n mov eax,[y] | ;\n\nexists\n(0:EAX=0 /\\ ~(1:ECX=2 \\/ y=3))\n";

    #[test]
    fn a_test_is_read() {
        let test = Test::parse(SB).unwrap();
        assert_eq!(
            (test.name.as_str(), test.locations.as_slice()),
            ("SB", &["x".to_owned(), "y".to_owned()][..])
        );
        assert_eq!(test.initial, [0, 7]);
        assert_eq!(test.registers, [(1, Register(1), 16)]);
        assert_eq!(
            test.threads,
            [
                vec![
                    Instruction::Store(Width::Double, 0, Operand::Constant(1)),
                    Instruction::Load(Width::Double, Register(0), 1)
                ],
                vec![Instruction::ExchangeAdd(Width::Double, 1, Register(1))],
            ]
        );
        assert_eq!(
            test.observed(),
            [
                Observed::Register(0, Register(0)),
                Observed::Register(1, Register(1)),
                Observed::Location(0),
                Observed::Location(1)
            ]
        );
        assert!(test.asks_about(&[0, 7, 1, 23]));
        assert!(!test.asks_about(&[0, 2, 1, 23]));
        assert!(!test.asks_about(&[0, 7, 1, 3]));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (from, to, line, words) in [
            ("X86 SB", "ARM SB", 1, "ARM"),
            ("Com=Fr Fr", "what", 3, "\"what\""),
            ("P0 | P1", "P0 | P2", 6, "should name the threads"),
            ("MOV [x],$1 |", "HLT |", 7, "\"HLT\""),
            ("MOV [x],$1 |", "", 7, "1 columns and 2 threads"),
            ("mov eax,[y]", "mov r12,[y]", 8, "\"r12\""),
            ("mov eax,[y]", "mov [y],$0x100000000", 8, "doesn't fit"),
            ("mov eax,[y]", "mov qword [y],$0x80000000", 8, "negative"),
            ("mov eax,[y]", "xadd [y],eax", 8, "with LOCK only"),
            ("0:EAX=0", "0:EBX=0", 11, "isn't loaded"),
            ("y=3))", "y=3)", 11, "there should be a )"),
            ("y=3", "z=3", 11, "no location \"z\""),
            ("exists", "perhaps", 10, "2 threads"),
        ] {
            let error = Test::parse(&SB.replacen(from, to, 1)).unwrap_err();
            assert_eq!(error.line, line, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert!(Test::parse("").is_err());
    }

    proptest! {
        /// No text makes the parser panic.
        #[test]
        fn any_text_is_read_or_refused(lines in prop::collection::vec(prop::sample::select(vec![
            "X86 a", "{ x; }", "{", "}", "P0 ;", "P0 | P1 ;", "MOV [x],$1 ;", "LOCK ;", "LOCK;", "lock inc [x] ;", "qword", "MOV qword,$1 ;",
            "XCHG [x],[y] ;", "exists (x=1)", "exists ((((", "forall ~", "exists x=1 /", "é ;", "LOCKé [x] ;", "exists (0:EAX=é)",
        ]), 0..12), text in ".{0,40}") {
            let _ = Test::parse(&(lines.join("\n") + "\n" + &text));
            let _ = Test::parse(&format!("X86 a\n{{}}\nP0 ;\n{text} ;\nexists {text}"));
        }
    }
}
