//! Values of flags with options: `FILE,readonly,serial=S`.

/// The first word of a flag's value and its options.
pub struct Options<'a> {
    words: Vec<(&'a str, Option<&'a str>)>,
}

impl<'a> Options<'a> {
    /// Splits at commas, then at the first `=` of each part.
    ///
    /// # Errors
    ///
    /// A part is empty, or an option is given twice.
    pub fn parse(text: &'a str) -> Result<Self, String> {
        let mut words: Vec<(&str, Option<&str>)> = Vec::new();
        for part in text.split(',') {
            let (name, value) = match part.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (part, None),
            };
            if name.is_empty() {
                return Err("there is nothing between two commas, or before an =".to_owned());
            }
            if words.iter().any(|(other, _)| *other == name) {
                return Err(format!("\"{}\" is given twice", name.escape_debug()));
            }
            words.push((name, value));
        }
        Ok(Self { words })
    }

    /// Removes and returns the first word, unless it is one of the `known` options or has a value.
    pub fn first(&mut self, known: &[&str]) -> Option<&'a str> {
        let (name, value) = self.words.first()?;
        if value.is_some() || known.contains(name) {
            return None;
        }
        Some(self.words.remove(0).0)
    }

    /// Removes and returns an option with a value.
    pub fn value(&mut self, name: &str) -> Result<Option<&'a str>, String> {
        match self.take(name) {
            None => Ok(None),
            Some(Some(value)) if !value.is_empty() => Ok(Some(value)),
            Some(_) => Err(format!("{name} needs a value; write {name}=...")),
        }
    }

    /// Removes an option with a value, and parses the value.
    pub fn parsed<T>(&mut self, name: &str) -> Result<Option<T>, String>
    where
        T: std::str::FromStr,
        T::Err: std::fmt::Display,
    {
        let Some(value) = self.value(name)? else { return Ok(None) };
        value.parse().map(Some).map_err(|error| format!("{name}={}: {error}", value.escape_debug()))
    }

    /// Removes an option that is on by its presence. `NAME=on|off` is explicit.
    pub fn switch(&mut self, name: &str) -> Result<bool, String> {
        match self.take(name) {
            None => Ok(false),
            Some(None | Some("on")) => Ok(true),
            Some(Some("off")) => Ok(false),
            Some(Some(other)) => {
                Err(format!("{name}={} is not known; allowed are on and off", other.escape_debug()))
            }
        }
    }

    /// Fails if options remain.
    pub fn finish(self, known: &[&str]) -> Result<(), String> {
        match self.words.first() {
            None => Ok(()),
            Some((name, _)) => {
                Err(format!("\"{}\" is not an option; known: {}", name.escape_debug(), known.join(", ")))
            }
        }
    }

    fn take(&mut self, name: &str) -> Option<Option<&'a str>> {
        let index = self.words.iter().position(|(other, _)| *other == name)?;
        Some(self.words.remove(index).1)
    }
}
