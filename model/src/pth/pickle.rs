//! Python's pickles, as far as `torch.save` writes them: protocols 2 to 5 (CPython's `pickletools` describes the opcodes). A
//! pickle is a program for a stack machine, and Python calls whatever function it names. Here none is called: that one would
//! be is a value like any other.

use std::collections::HashMap;

/// The place of a value among a pickle's [`Values`]: one may lie in several others, and in itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Id(usize);

/// What a pickle is made of.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An integer of up to 64 bits.
    Int(i64),
    /// A text.
    Text(String),
    /// A tuple or a list.
    Sequence(Vec<Id>),
    /// A dictionary.
    Dict(Vec<(Id, Id)>),
    /// A class or a function: its module, a dot, its name.
    Global(String),
    /// What a function returns, or a class makes, of a tuple of arguments; and what is then put in, where it is a dictionary.
    Call { function: Id, arguments: Id, entries: Vec<(Id, Id)> },
    /// What lies outside of the pickle, by its description.
    Persistent(Id),
    /// Of no use here: None, truth, fractions, bytes, sets.
    Other,
}

/// The values of a pickle.
#[derive(Debug)]
pub struct Values {
    values: Vec<Value>,
    top: Id,
}

impl Values {
    /// Reads a pickle. Errors say what is wrong with it.
    pub fn read(pickle: &[u8]) -> Result<Self> {
        let mut machine =
            Machine { pickle, at: 0, values: vec![Value::Other], stack: vec![], marks: vec![], memo: HashMap::new() };
        let top = machine.run()?;
        Ok(Self { values: machine.values, top })
    }

    /// The value that the whole pickle is.
    pub fn top(&self) -> Id {
        self.top
    }

    /// A value.
    pub fn get(&self, id: Id) -> &Value {
        &self.values[id.0]
    }

    /// The entries of a dictionary, of whatever class.
    pub fn entries(&self, id: Id) -> &[(Id, Id)] {
        match self.get(id) {
            Value::Dict(entries) | Value::Call { entries, .. } => entries,
            _ => &[],
        }
    }
}

type Result<T> = std::result::Result<T, String>;

/// The place of the one [`Value::Other`].
const OTHER: Id = Id(0);
/// No class has a longer name. Otherwise a few bytes, repeated, would make long ones.
const LONGEST_NAME: usize = 1000;

struct Machine<'p> {
    pickle: &'p [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// The heights of the stack at which marks were set.
    marks: Vec<usize>,
    memo: HashMap<usize, Id>,
}

impl Machine<'_> {
    fn run(&mut self) -> Result<Id> {
        loop {
            let opcode = self.byte()?;
            match opcode {
                b'.' => return self.pop(),
                b'\x80' => _ = self.byte()?,   // PROTO
                b'\x95' => _ = self.bytes(8)?, // FRAME
                b'(' => self.marks.push(self.stack.len()),
                b'0' => _ = self.pop()?,
                b'1' => _ = self.marked()?,
                b'2' => {
                    let top = self.pop()?;
                    self.stack.extend([top, top]);
                }
                b'N' | b'\x88' | b'\x89' => self.stack.push(OTHER), // None, True, False
                b'G' => self.skip(8)?,                              // a fraction
                b'K' => self.integer(1)?,
                b'M' => self.integer(2)?,
                b'J' => {
                    let signed = i32::from_le_bytes(self.array()?);
                    self.push(Value::Int(signed.into()));
                }
                b'\x8a' => self.long(1)?,
                b'\x8b' => self.long(4)?,
                b'X' => self.text(4)?,
                b'\x8c' | b'U' => self.text(1)?,
                b'\x8d' => self.text(8)?,
                b'T' => self.text(4)?,
                b'C' => self.unknown(1)?,
                b'B' => self.unknown(4)?,
                b'\x8e' | b'\x96' => self.unknown(8)?,
                b')' | b']' => self.push(Value::Sequence(vec![])),
                b'}' => self.push(Value::Dict(vec![])),
                b'\x8f' => self.stack.push(OTHER), // EMPTY_SET
                b't' | b'l' => {
                    let items = self.marked()?;
                    self.push(Value::Sequence(items));
                }
                b'd' => {
                    let entries = pairs(&self.marked()?)?;
                    self.push(Value::Dict(entries));
                }
                b'\x91' => {
                    self.marked()?; // FROZENSET
                    self.stack.push(OTHER);
                }
                b'\x85' => {
                    let items = self.popped::<1>()?;
                    self.push(Value::Sequence(items.into()));
                }
                b'\x86' => {
                    let items = self.popped::<2>()?;
                    self.push(Value::Sequence(items.into()));
                }
                b'\x87' => {
                    let items = self.popped::<3>()?;
                    self.push(Value::Sequence(items.into()));
                }
                b'a' => {
                    let item = self.pop()?;
                    self.append(&[item])?;
                }
                b'e' => {
                    let items = self.marked()?;
                    self.append(&items)?;
                }
                b's' => {
                    let entry = self.popped::<2>()?;
                    self.insert(&entry)?;
                }
                b'u' => {
                    let entries = self.marked()?;
                    self.insert(&entries)?;
                }
                b'\x90' => _ = self.marked()?, // ADDITEMS
                b'q' => {
                    let place = self.unsigned(1)?;
                    self.remember(place)?;
                }
                b'r' => {
                    let place = self.unsigned(4)?;
                    self.remember(place)?;
                }
                b'\x94' => self.remember(self.memo.len())?,
                b'h' => self.recall(1)?,
                b'j' => self.recall(4)?,
                b'c' => {
                    let name = format!("{}.{}", self.line()?, self.line()?);
                    self.push(Value::Global(name));
                }
                b'\x93' => self.named()?,
                b'Q' => {
                    let description = self.pop()?;
                    self.push(Value::Persistent(description));
                }
                b'R' | b'\x81' => {
                    let [function, arguments] = self.popped()?;
                    self.push(Value::Call { function, arguments, entries: vec![] });
                }
                b'\x92' => {
                    let [function, arguments, _keywords] = self.popped()?;
                    self.push(Value::Call { function, arguments, entries: vec![] });
                }
                b'b' => _ = self.pop()?, // BUILD: attributes of an object
                other => return Err(format!("its pickle has the unknown opcode {other:#04x} at byte {}", self.at - 1)),
            }
        }
    }

    fn push(&mut self, value: Value) {
        self.stack.push(Id(self.values.len()));
        self.values.push(value);
    }

    /// Takes the top off the stack, which must lie above the last mark.
    fn pop(&mut self) -> Result<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let top = if self.stack.len() > floor { self.stack.pop() } else { None };
        top.ok_or_else(|| self.inconsistent())
    }

    /// Takes so many values off the stack; the top is the last.
    fn popped<const N: usize>(&mut self) -> Result<[Id; N]> {
        let mut values = [OTHER; N];
        for value in values.iter_mut().rev() {
            *value = self.pop()?;
        }
        Ok(values)
    }

    /// Takes all off the stack that lies above the last mark, and the mark.
    fn marked(&mut self) -> Result<Vec<Id>> {
        let mark = self.marks.pop().ok_or_else(|| self.inconsistent())?;
        Ok(self.stack.split_off(mark))
    }

    fn top(&mut self) -> Result<Id> {
        let top = self.pop()?;
        self.stack.push(top);
        Ok(top)
    }

    fn append(&mut self, items: &[Id]) -> Result<()> {
        let top = self.top()?;
        if let Value::Sequence(before) = &mut self.values[top.0] {
            before.extend(items);
        }
        Ok(())
    }

    fn insert(&mut self, items: &[Id]) -> Result<()> {
        let (top, more) = (self.top()?, pairs(items)?);
        if let Value::Dict(entries) | Value::Call { entries, .. } = &mut self.values[top.0] {
            entries.extend(more);
        }
        Ok(())
    }

    fn remember(&mut self, place: usize) -> Result<()> {
        let top = self.top()?;
        self.memo.insert(place, top);
        Ok(())
    }

    fn recall(&mut self, width: usize) -> Result<()> {
        let place = self.unsigned(width)?;
        let value = *self.memo.get(&place).ok_or_else(|| self.inconsistent())?;
        self.stack.push(value);
        Ok(())
    }

    /// A class or function whose module and name lie on the stack.
    fn named(&mut self) -> Result<()> {
        let [module, name] = self.popped()?;
        let global = match (&self.values[module.0], &self.values[name.0]) {
            (Value::Text(module), Value::Text(name)) if module.len().max(name.len()) <= LONGEST_NAME => {
                format!("{module}.{name}")
            }
            _ => return Err(self.inconsistent()),
        };
        self.push(Value::Global(global));
        Ok(())
    }

    fn skip(&mut self, count: usize) -> Result<()> {
        self.bytes(count)?;
        self.stack.push(OTHER);
        Ok(())
    }

    /// Bytes that are of no use, behind their number.
    fn unknown(&mut self, width: usize) -> Result<()> {
        let count = self.unsigned(width)?;
        self.skip(count)
    }

    fn integer(&mut self, width: usize) -> Result<()> {
        let value = self.unsigned(width)?;
        // Of two bytes at most.
        self.push(Value::Int(value as i64));
        Ok(())
    }

    /// An integer of any length, in two's complement.
    fn long(&mut self, width: usize) -> Result<()> {
        let count = self.unsigned(width)?;
        let bytes = self.bytes(count)?;
        if bytes.len() > 8 {
            self.stack.push(OTHER);
            return Ok(());
        }
        let sign = if bytes.last().is_some_and(|&highest| highest >= 0x80) { 0xff } else { 0 };
        let mut wide = [sign; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(wide)));
        Ok(())
    }

    /// A text behind the number of its bytes. Those of Python 2 may be no texts.
    fn text(&mut self, width: usize) -> Result<()> {
        let count = self.unsigned(width)?;
        match std::str::from_utf8(self.bytes(count)?).map(str::to_owned) {
            Ok(text) => self.push(Value::Text(text)),
            Err(_) => self.stack.push(OTHER),
        }
        Ok(())
    }

    fn line(&mut self) -> Result<String> {
        let rest = &self.pickle[self.at..];
        let length = rest.iter().position(|&byte| byte == b'\n').ok_or_else(ends)?;
        let line = std::str::from_utf8(&rest[..length]).map_err(|_| self.inconsistent())?;
        self.at += length + 1;
        Ok(line.to_owned())
    }

    fn unsigned(&mut self, width: usize) -> Result<usize> {
        let mut wide = [0; 8];
        wide[..width].copy_from_slice(self.bytes(width)?);
        usize::try_from(u64::from_le_bytes(wide)).map_err(|_| ends())
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.bytes(1)?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.bytes(N)?.try_into().map_err(|_| ends())
    }

    fn bytes(&mut self, count: usize) -> Result<&[u8]> {
        let rest = &self.pickle[self.at..];
        let bytes = rest.get(..count).ok_or_else(ends)?;
        self.at += count;
        Ok(bytes)
    }

    fn inconsistent(&self) -> String {
        format!("its pickle makes no sense at byte {}", self.at.saturating_sub(1))
    }
}

fn ends() -> String {
    "its pickle ends too early".to_owned()
}

fn pairs(items: &[Id]) -> Result<Vec<(Id, Id)>> {
    match items.as_chunks::<2>() {
        (pairs, []) => Ok(pairs.iter().map(|&[key, value]| (key, value)).collect()),
        _ => Err("its pickle has a key without a value".to_owned()),
    }
}
