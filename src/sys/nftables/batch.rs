//! The messages of one transaction, written in place.
//!
//! Invariant: elements are written once, straight from where they are kept; a message's index in
//! a refusal is that of the calls that made it.

use super::userdata::{comment, set_types};
use super::{
    ChainType, DELCHAIN, DELRULE, DELSET, DELSETELEM, DELTABLE, Family, Hook, LIST_ELEM, NEWCHAIN, NEWRULE, NEWSET, NEWSETELEM,
    NEWTABLE, SUBSYSTEM, Set, SetData, Verdict,
};
use crate::sys::netlink::{Attrs, BatchError, HEADER, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, Socket, attribute, attributes};
use crate::sys::nftables::expr::Expr;
use crate::sys::wire::Wire;

const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// A nest takes 64 KiB; the longest element has 500 bytes.
const ELEMENTS_ROOM: usize = 60 * 1024;
const ELEM_INTERVAL_END: u32 = 1;

/// One element as it is written.
#[derive(Clone, Copy, Debug)]
pub struct Element<'a> {
    pub key: &'a [u8],
    /// Of a range of several fields.
    pub key_end: Option<&'a [u8]>,
    /// Of a range of one field: this key is the first that is not in it any more.
    pub is_end: bool,
    pub content: Content<'a>,
    pub comment: &'a str,
}

#[derive(Clone, Copy, Debug)]
pub enum Content<'a> {
    None,
    Data(&'a [u8]),
    Verdict(&'a Verdict),
}

/// The messages of one transaction on the table `name`.
#[derive(Clone, Debug)]
pub struct Batch {
    family: Family,
    table: String,
    wire: Wire,
    sets: u32,
}

impl Batch {
    pub fn new(family: Family, table: &str) -> Batch {
        let mut wire = Wire::default();
        wire.begin(BATCH_BEGIN, 0, [0, 0, 0, SUBSYSTEM as u8]);
        wire.end();
        Batch { family, table: table.to_owned(), wire, sets: 0 }
    }
    /// Messages in it.
    pub fn len(&self) -> usize {
        self.wire.messages() - 1
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// All bytes of the messages so far, for fingerprints.
    pub fn bytes(&self) -> &[u8] {
        self.wire.as_slice()
    }

    /// Which element of a message of elements stands at an error's offset.
    pub fn element_at(&self, message: usize, offset: u32) -> Option<usize> {
        let bytes = self.wire.message(message + 1)?;
        let (header, list) = (HEADER + 4, attribute(bytes.get(HEADER + 4..)?, 3)?);
        // Where the list stands in the message: it is the last attribute.
        let list_start = bytes.len().checked_sub(list.len().next_multiple_of(4))?;
        let mut at = list_start.max(header);
        for (index, (_, element)) in attributes(list).enumerate() {
            let next = at + (element.len() + 4).next_multiple_of(4);
            if (at..next).contains(&(offset as usize)) {
                return Some(index);
            }
            at = next;
        }
        None
    }

    fn begin(&mut self, kind: u16, flags: u16) {
        self.wire.begin(SUBSYSTEM << 8 | kind, flags, [self.family.number(), 0, 0, 0]);
        self.wire.text(1, &self.table);
    }
    fn push(&mut self, kind: u16, flags: u16, attrs: &Attrs) {
        self.begin(kind, flags);
        self.wire.attrs(attrs);
        self.wire.end();
    }

    /// Makes the table, or wakes it up where it is there; nothing happens where it is awake.
    pub fn add_table(&mut self) {
        // No flags: with none named those that it has would stay.
        self.push(NEWTABLE, NLM_F_CREATE, &Attrs::new().be32(2, 0));
    }
    /// With all that is in it.
    pub fn delete_table(&mut self) {
        self.push(DELTABLE, 0, &Attrs::new());
    }
    pub fn add_chain(&mut self, name: &str) {
        self.push(NEWCHAIN, NLM_F_CREATE, &Attrs::new().text(3, name));
    }
    /// A chain that the kernel enters at `hook`, policy accept.
    pub fn add_base_chain(&mut self, name: &str, kind: ChainType, hook: Hook, priority: i32) {
        let place = Attrs::new().be32(1, hook as u32).be32(2, priority as u32);
        let attrs = Attrs::new().text(3, name).nest(4, place).be32(5, 1).text(7, kind.name());
        self.push(NEWCHAIN, NLM_F_CREATE, &attrs);
    }
    /// Nothing may lead to it any more.
    pub fn delete_chain(&mut self, name: &str) {
        self.push(DELCHAIN, 0, &Attrs::new().text(3, name));
    }
    /// All rules of a chain that is there.
    pub fn flush_chain(&mut self, name: &str) {
        self.push(DELRULE, 0, &Attrs::new().text(2, name));
    }
    /// Behind the others.
    pub fn add_rule(&mut self, chain: &str, exprs: &[Expr], text: &str) {
        let list = exprs.iter().fold(Attrs::new(), |list, e| list.nest(LIST_ELEM, e.0.clone()));
        let attrs = Attrs::new().text(2, chain).nest(4, list).bytes(7, &comment(text));
        self.push(NEWRULE, NLM_F_CREATE | NLM_F_APPEND, &attrs);
    }
    pub fn add_set(&mut self, set: &Set) {
        self.sets += 1;
        let expected = set.expected();
        let attrs = Attrs::new().text(2, set.name).be32(3, expected.flags);
        let attrs = attrs.be32(4, expected.key_type).be32(5, expected.key_length);
        let attrs = attrs.when(set.data != SetData::None, |a| a.be32(6, expected.data_type).be32(7, expected.data_length));
        let fields = set.key.iter().fold(Attrs::new(), |list, f| list.nest(LIST_ELEM, Attrs::new().be32(1, f.length())));
        let description = Attrs::new().when(set.dynamic.is_some(), |a| a.be32(1, expected.size));
        let description = description.when(set.interval && set.key.len() > 1, |a| a.nest(2, fields));
        let attrs = attrs.when(!description.as_slice().is_empty(), |a| a.nest(9, description)).be32(10, self.sets);
        let attrs = attrs.when(set.dynamic.is_some(), |a| a.bytes(11, &expected.timeout.to_be_bytes()));
        let types = set_types(set);
        let attrs = attrs.when(!types.is_empty(), |a| a.bytes(13, &types));
        self.push(NEWSET, NLM_F_CREATE | NLM_F_EXCL, &attrs);
    }
    /// With its elements; no rule may name it any more.
    pub fn delete_set(&mut self, name: &str) {
        self.push(DELSET, 0, &Attrs::new().text(2, name));
    }
    /// As many of the elements as fit into one message, `most` at most; how many that were. Of
    /// the same key with other data is EEXIST; that are there already are fine.
    pub fn add_elements<'a>(&mut self, set: &str, elements: &mut dyn Iterator<Item = Element<'a>>, most: usize) -> usize {
        self.elements(NEWSETELEM, NLM_F_CREATE, set, elements, most)
    }
    /// Likewise; each of them must be there.
    pub fn delete_elements<'a>(&mut self, set: &str, elements: &mut dyn Iterator<Item = Element<'a>>, most: usize) -> usize {
        self.elements(DELSETELEM, 0, set, elements, most)
    }

    fn elements<'a>(
        &mut self,
        kind: u16,
        flags: u16,
        set: &str,
        elements: &mut dyn Iterator<Item = Element<'a>>,
        most: usize,
    ) -> usize {
        self.begin(kind, flags);
        self.wire.text(2, set);
        let list = self.wire.nest(3);
        let mut count = 0;
        while count < most && self.wire.room_taken(&list) < ELEMENTS_ROOM {
            let Some(element) = elements.next() else { break };
            self.element(&element, kind == NEWSETELEM);
            count += 1;
        }
        self.wire.close(list);
        self.wire.end();
        count
    }

    fn element(&mut self, element: &Element, whole: bool) {
        let wire = &mut self.wire;
        let one = wire.nest(LIST_ELEM);
        let key = wire.nest(1);
        wire.bytes(1, element.key);
        wire.close(key);
        if element.is_end {
            wire.be32(3, ELEM_INTERVAL_END);
        }
        if let Some(end) = element.key_end {
            let nest = wire.nest(10);
            wire.bytes(1, end);
            wire.close(nest);
        }
        if whole {
            match element.content {
                Content::None => {}
                Content::Data(data) => {
                    let nest = wire.nest(2);
                    wire.bytes(1, data);
                    wire.close(nest);
                }
                Content::Verdict(verdict) => {
                    let nest = wire.nest(2);
                    let inner = wire.nest(2);
                    wire.be32(1, verdict.code() as u32);
                    if let Some(chain) = verdict.chain() {
                        wire.text(2, chain);
                    }
                    wire.close(inner);
                    wire.close(nest);
                }
            }
            if !element.comment.is_empty() {
                wire.bytes(6, &comment(element.comment));
            }
        }
        wire.close(one);
    }
}

/// Carries out the transaction. Indices in an error are those of the batch's messages.
pub fn commit(socket: &mut Socket, what: &str, batch: &mut Batch) -> Result<(), BatchError> {
    if batch.is_empty() {
        return Ok(());
    }
    let wire = &mut batch.wire;
    wire.begin(BATCH_END, 0, [0, 0, 0, SUBSYSTEM as u8]);
    wire.end();
    let last = wire.messages() - 2;
    let result = socket.transact(what, wire, last);
    wire.pop();
    let inside = |at: usize| at.checked_sub(1);
    result.map_err(|e| BatchError {
        message: e.message.and_then(inside),
        error: e.error,
        others: e.others.into_iter().filter_map(|(at, error)| Some((inside(at)?, error))).collect(),
    })
}
