//! Python's pickles, as far as `torch.save` writes them: protocols 2 to 5 (CPython's `pickletools` describes the
//! opcodes). A pickle is a program for a stack machine, and Python calls whatever function it names. Here no function
//! is called: a call is recorded as a value. Nothing is copied either, so a short pickle cannot expand into a large
//! structure.

use super::op;
use std::collections::HashMap;

/// The index of a value among a pickle's [`Values`]: a value may be contained in several others, and in itself.
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
    /// A class or a function, by two texts.
    Global { module: Id, name: Id },
    /// The result of calling a function or a class with a tuple of arguments; and the entries that are then inserted,
    /// if it is a dictionary.
    Call { function: Id, arguments: Id, entries: Vec<(Id, Id)> },
    /// An object outside the pickle, given by its description (persistent ID).
    Persistent(Id),
    /// Values that are not used here: None, booleans, floats, bytes, sets.
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

    /// A text.
    pub fn text(&self, id: Id) -> Option<&str> {
        if let Value::Text(text) = self.get(id) { Some(text) } else { None }
    }

    /// The module and the name of a class or function.
    pub fn global(&self, id: Id) -> Option<(&str, &str)> {
        match *self.get(id) {
            Value::Global { module, name } => Some((self.text(module)?, self.text(name)?)),
            _ => None,
        }
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
/// The longest text that is read, in bytes. A pickle can use one as often as it likes, and whoever looks at it copies
/// or compares all of it each time.
const MAX_TEXT: usize = 1 << 10;

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
                op::STOP => return self.pop(),
                op::PROTO => _ = self.byte()?,
                op::FRAME => _ = self.bytes(8)?,

                op::MARK => self.marks.push(self.stack.len()),
                op::POP => _ = self.pop()?,
                op::POP_MARK | op::ADDITEMS => _ = self.marked()?,
                op::DUP => {
                    let top = self.top()?;
                    self.stack.push(top);
                }

                op::NONE | op::NEWTRUE | op::NEWFALSE | op::EMPTY_SET => self.stack.push(OTHER),
                op::BINFLOAT => self.push_other(8)?,
                op::BININT1 => self.integer(1)?,
                op::BININT2 => self.integer(2)?,
                op::BININT => {
                    let signed = i32::from_le_bytes(self.array()?);
                    self.push(Value::Int(signed.into()));
                }
                op::LONG1 => self.long(1)?,
                op::LONG4 => self.long(4)?,
                op::SHORT_BINUNICODE | op::SHORT_BINSTRING => self.text(1)?,
                op::BINUNICODE | op::BINSTRING => self.text(4)?,
                op::BINUNICODE8 => self.text(8)?,
                op::SHORT_BINBYTES => self.push_other_counted(1)?,
                op::BINBYTES => self.push_other_counted(4)?,
                op::BINBYTES8 | op::BYTEARRAY8 => self.push_other_counted(8)?,

                op::EMPTY_TUPLE | op::EMPTY_LIST => self.push(Value::Sequence(vec![])),
                op::TUPLE1 => self.tuple::<1>()?,
                op::TUPLE2 => self.tuple::<2>()?,
                op::TUPLE3 => self.tuple::<3>()?,
                op::TUPLE | op::LIST => {
                    let items = self.marked()?;
                    self.push(Value::Sequence(items));
                }
                op::APPEND => {
                    let item = self.pop()?;
                    self.append(&[item])?;
                }
                op::APPENDS => {
                    let items = self.marked()?;
                    self.append(&items)?;
                }
                op::FROZENSET => {
                    self.marked()?;
                    self.stack.push(OTHER);
                }
                op::EMPTY_DICT => self.push(Value::Dict(vec![])),
                op::DICT => {
                    let entries = pairs(&self.marked()?)?;
                    self.push(Value::Dict(entries));
                }
                op::SETITEM => {
                    let entry = self.popped::<2>()?;
                    self.insert(&entry)?;
                }
                op::SETITEMS => {
                    let entries = self.marked()?;
                    self.insert(&entries)?;
                }

                op::BINPUT => {
                    let place = self.unsigned(1)?;
                    self.remember(place)?;
                }
                op::LONG_BINPUT => {
                    let place = self.unsigned(4)?;
                    self.remember(place)?;
                }
                op::MEMOIZE => self.remember(self.memo.len())?,
                op::BINGET => self.recall(1)?,
                op::LONG_BINGET => self.recall(4)?,

                op::GLOBAL => {
                    let [module, name] = [self.line()?, self.line()?].map(|line| self.kept(Value::Text(line)));
                    self.push(Value::Global { module, name });
                }
                op::STACK_GLOBAL => {
                    let [module, name] = self.popped()?;
                    self.push(Value::Global { module, name });
                }
                op::BINPERSID => {
                    let description = self.pop()?;
                    self.push(Value::Persistent(description));
                }
                op::REDUCE | op::NEWOBJ => {
                    let [function, arguments] = self.popped()?;
                    self.push(Value::Call { function, arguments, entries: vec![] });
                }
                op::NEWOBJ_EX => {
                    let [function, arguments, _keywords] = self.popped()?;
                    self.push(Value::Call { function, arguments, entries: vec![] });
                }
                // Discards an object's attributes, such as an OrderedDict's `_metadata`; the tensors of a module that
                // was saved as a whole are among its attributes, too.
                op::BUILD => _ = self.pop()?,
                other => {
                    let at = self.at - 1;
                    return Err(format!(
                        "its pickle has {other:#04x} at byte {at}, which protocols 2 to 5 do not know"
                    ));
                }
            }
        }
    }

    fn kept(&mut self, value: Value) -> Id {
        self.values.push(value);
        Id(self.values.len() - 1)
    }

    fn push(&mut self, value: Value) {
        let id = self.kept(value);
        self.stack.push(id);
    }

    fn tuple<const N: usize>(&mut self) -> Result<()> {
        let items = self.popped::<N>()?;
        self.push(Value::Sequence(items.into()));
        Ok(())
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

    fn push_other(&mut self, count: usize) -> Result<()> {
        self.bytes(count)?;
        self.stack.push(OTHER);
        Ok(())
    }

    /// Length-prefixed bytes that are not used.
    fn push_other_counted(&mut self, width: usize) -> Result<()> {
        let count = self.unsigned(width)?;
        self.push_other(count)
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

    /// A length-prefixed text. Those of Python 2 may not be valid UTF-8, and what is too long is no name.
    fn text(&mut self, width: usize) -> Result<()> {
        let count = self.unsigned(width)?;
        match std::str::from_utf8(self.bytes(count)?) {
            Ok(text) if count <= MAX_TEXT => {
                let text = text.to_owned();
                self.push(Value::Text(text));
            }
            _ => self.stack.push(OTHER),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_passed_over_whatever_says_how_many_there_are() {
        let counted: [&[u8]; 4] = [
            &[op::SHORT_BINBYTES, 2],
            &[op::BINBYTES, 2, 0, 0, 0],
            &[op::BINBYTES8, 2, 0, 0, 0, 0, 0, 0, 0],
            &[op::BYTEARRAY8, 2, 0, 0, 0, 0, 0, 0, 0],
        ];
        for counted in counted {
            let pickle =
                [&[op::EMPTY_LIST, op::MARK], counted, &[op::STOP; 2], &[op::BININT1, 7, op::APPENDS, op::STOP]]
                    .concat();
            let values = Values::read(&pickle).unwrap();
            let Value::Sequence(entries) = values.get(values.top()) else { panic!("{:?}", values.get(values.top())) };
            let entries: Vec<&Value> = entries.iter().map(|&entry| values.get(entry)).collect();
            assert_eq!(entries, [&Value::Other, &Value::Int(7)]);
        }
    }
}
