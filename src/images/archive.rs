//! Reads tar entries one by one from a stream; the `tar` crate lays out the header, nothing more.
//!
//! Agrees with Go's archive/tar, which docker and containerd use, about every archive that it
//! accepts; where two readers could see different files (a size twice, two names for one entry,
//! sparse files, global sizes) it refuses. Invariant: the stream stands at a block's start before
//! each header; an entry's data cannot be read past its end. pax(1), tar(5).

use std::io::{self, Read};

use tar::Header;

const BLOCK: usize = 512;
/// Of a pax header or a GNU long name; as in Go.
const MAX_EXTENSION: u64 = 1 << 20;
/// PATH_MAX: longer ones cannot be opened.
const MAX_PATH: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    HardLink,
    Symlink,
    Char,
    Block,
    Dir,
    Fifo,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// As written; nothing about it was checked but its length and that it holds no NUL.
    pub name: Vec<u8>,
    pub link: Vec<u8>,
    pub kind: Kind,
    pub size: u64,
    /// The twelve permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Seconds and nanoseconds.
    pub mtime: (i64, u32),
    pub device: (u32, u32),
    /// Names without the `SCHILY.xattr.` before them.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error("the tar archive is malformed: {0}")]
    Malformed(String),
    #[error("the stream broke off or could not be read")]
    Read(#[source] io::Error),
}

fn malformed<T>(why: impl Into<String>) -> Result<T, ArchiveError> {
    Err(ArchiveError::Malformed(why.into()))
}

pub struct Archive<R> {
    inner: R,
    /// Data of the current entry that was not read yet.
    left: u64,
    /// Bytes behind it up to the next block.
    pad: u64,
    ended: bool,
}

/// The numbers of one header. As in Go all of them must be numbers, whatever the entry is.
struct Fields {
    mode: u64,
    uid: u64,
    gid: u64,
    size: u64,
    mtime: i64,
    major: u64,
    minor: u64,
}

impl Fields {
    fn of(header: &Header) -> Result<Fields, ArchiveError> {
        let old = header.as_old();
        let bytes = header.as_bytes();
        let known = bytes.get(257..262) == Some(b"ustar");
        let device =
            |range: std::ops::Range<usize>| if known { number(bytes.get(range).unwrap_or_default(), "device") } else { Ok(0) };
        Ok(Fields {
            mode: number(&old.mode, "mode")?,
            uid: number(&old.uid, "uid")?,
            gid: number(&old.gid, "gid")?,
            size: number(&old.size, "size")?,
            mtime: signed(&old.mtime, "mtime")?,
            major: device(329..337)?,
            minor: device(337..345)?,
        })
    }
}

/// What pax and GNU headers said about the entry that follows them.
#[derive(Default)]
struct Extension {
    pax: bool,
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
}

impl Extension {
    fn is_empty(&self) -> bool {
        !self.pax && self.long_name.is_none() && self.long_link.is_none()
    }
}

impl<R: Read> Archive<R> {
    pub fn new(inner: R) -> Archive<R> {
        Archive { inner, left: 0, pad: 0, ended: false }
    }

    /// The next entry; what was left of the one before is skipped.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, ArchiveError> {
        let mut extension = Extension::default();
        loop {
            self.skip()?;
            let Some(header) = self.header()? else {
                if !extension.is_empty() {
                    return malformed("it ends after an extended header");
                }
                return Ok(None);
            };
            let kind = header.as_bytes()[156];
            let fields = Fields::of(&header)?;
            let size = fields.size;
            match kind {
                b'x' => {
                    if extension.pax {
                        return malformed("two extended headers for one entry");
                    }
                    extension.pax = true;
                    let data = self.extension_data(size)?;
                    extension.read_pax(&data)?;
                }
                b'g' => {
                    if !extension.is_empty() {
                        return malformed("a global header between an extended header and its entry");
                    }
                    let data = self.extension_data(size)?;
                    let mut global = Extension::default();
                    global.read_pax(&data)?;
                    if global.name.is_some() || global.link.is_some() || global.size.is_some() {
                        return malformed("a global header that names files or sizes");
                    }
                }
                b'L' | b'K' => {
                    let mut data = self.extension_data(size)?;
                    data.truncate(data.iter().position(|b| *b == 0).unwrap_or(data.len()));
                    if data.is_empty() {
                        return malformed("an empty long name");
                    }
                    let slot = if kind == b'L' { &mut extension.long_name } else { &mut extension.long_link };
                    if slot.replace(data).is_some() {
                        return malformed("two long names for one entry");
                    }
                }
                _ => return self.entry(&header, kind, &fields, extension).map(Some),
            }
        }
    }

    fn entry(&mut self, header: &Header, kind: u8, fields: &Fields, extension: Extension) -> Result<Entry, ArchiveError> {
        let old = header.as_old();
        let mut name = text(&old.name).to_vec();
        let magic = header.as_bytes().get(257..265).unwrap_or_default();
        if magic.starts_with(b"ustar\0") {
            let prefix = header.as_bytes().get(345..500).unwrap_or_default();
            // Only star puts times behind a shorter prefix.
            let star = header.as_bytes().get(508..512) == Some(b"tar\0");
            let prefix = text(if star { prefix.get(..131).unwrap_or_default() } else { prefix });
            if !prefix.is_empty() {
                name = [prefix, b"/", &name].concat();
            }
        }
        let mut link = text(&old.linkname).to_vec();
        if (extension.name.is_some() && extension.long_name.is_some())
            || (extension.link.is_some() && extension.long_link.is_some())
        {
            return malformed("an entry with two names");
        }
        if let Some(long) = extension.name.or(extension.long_name) {
            name = long;
        }
        if let Some(long) = extension.link.or(extension.long_link) {
            link = long;
        }
        if name.len() > MAX_PATH || link.len() > MAX_PATH {
            return malformed("a name of more than 4096 bytes");
        }
        let kind = match kind {
            b'\0' if name.ends_with(b"/") => Kind::Dir,
            b'0' | b'\0' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' => Kind::Char,
            b'4' => Kind::Block,
            b'5' => Kind::Dir,
            b'6' => Kind::Fifo,
            b'S' => return malformed(format!("{}: sparse files are not supported", show(&name))),
            other => return malformed(format!("{}: entry type 0x{other:02x} is not supported", show(&name))),
        };
        let size = extension.size.unwrap_or(fields.size);
        // As in Go: other kinds have no data, whatever their size field says.
        let data = if kind == Kind::File { size } else { 0 };
        self.left = data;
        self.pad = padding(data);
        let device = if matches!(kind, Kind::Char | Kind::Block) {
            (narrow(fields.major, "device")?, narrow(fields.minor, "device")?)
        } else {
            (0, 0)
        };
        Ok(Entry {
            kind,
            size: data,
            mode: (fields.mode & 0o7777) as u32,
            uid: match extension.uid {
                Some(uid) => uid,
                None => narrow(fields.uid, "uid")?,
            },
            gid: match extension.gid {
                Some(gid) => gid,
                None => narrow(fields.gid, "gid")?,
            },
            mtime: match extension.mtime {
                Some(time) => time,
                None => (fields.mtime, 0),
            },
            device,
            xattrs: extension.xattrs,
            name,
            link,
        })
    }

    /// A header block whose checksum fits; None at the end of the archive.
    fn header(&mut self) -> Result<Option<Header>, ArchiveError> {
        if self.ended {
            return Ok(None);
        }
        let mut header = Header::new_old();
        for block in 0..2 {
            if !self.block(header.as_mut_bytes())? {
                self.ended = true;
                return Ok(None);
            }
            let zero = header.as_bytes().iter().all(|b| *b == 0);
            match (zero, block) {
                (false, 0) => break,
                (false, _) => return malformed("one zero block in the middle"),
                (true, 0) => {}
                (true, _) => {
                    self.ended = true;
                    return Ok(None);
                }
            }
        }
        let sum = number(&header.as_old().cksum, "checksum")?;
        let bytes = header.as_bytes();
        let fields = bytes.iter().enumerate();
        let want: u64 = fields.map(|(at, b)| if (148..156).contains(&at) { u64::from(b' ') } else { u64::from(*b) }).sum();
        if sum != want {
            return malformed("a header's checksum is wrong");
        }
        Ok(Some(header))
    }

    /// Fills one block; false at a clean end of the stream.
    fn block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool, ArchiveError> {
        let mut filled = 0;
        while let Some(rest) = block.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.inner.read(rest) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return malformed("it breaks off inside a header"),
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(ArchiveError::Read(e)),
            }
        }
        Ok(true)
    }

    fn extension_data(&mut self, size: u64) -> Result<Vec<u8>, ArchiveError> {
        if size > MAX_EXTENSION {
            return malformed("an extended header of more than 1 MiB");
        }
        self.left = size;
        self.pad = padding(size);
        let mut data = Vec::new();
        let read = self.read_all(&mut data);
        read.map_err(ArchiveError::Read)?;
        Ok(data)
    }

    fn read_all(&mut self, into: &mut Vec<u8>) -> io::Result<()> {
        self.read_to_end(into).map(drop)
    }

    /// To the next block's start.
    fn skip(&mut self) -> Result<(), ArchiveError> {
        let mut scratch = [0; 8192];
        while self.left > 0 {
            self.read(&mut scratch).map_err(ArchiveError::Read)?;
        }
        let pad = scratch.get_mut(..self.pad as usize).unwrap_or_default();
        self.inner.read_exact(pad).map_err(ArchiveError::Read)?;
        self.pad = 0;
        Ok(())
    }

    pub fn into_inner(self) -> R {
        self.inner
    }

    /// Reads whatever follows the end, so that the stream below is hashed to its end.
    pub fn drain(&mut self) -> Result<(), ArchiveError> {
        io::copy(&mut self.inner, &mut io::sink()).map(drop).map_err(ArchiveError::Read)
    }
}

/// The current entry's data. An archive that ends inside it is an error, never a short file.
impl<R: Read> Read for Archive<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let Some(buffer) = buffer.get_mut(..most).filter(|b| !b.is_empty()) else { return Ok(0) };
        let n = self.inner.read(buffer)?;
        if n == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive ends inside an entry"));
        }
        self.left -= n as u64;
        Ok(n)
    }
}

impl Extension {
    /// Records of `length key=value\n`. Of a key that comes twice the last counts, as in Go,
    /// except where it says which file or how long.
    fn read_pax(&mut self, mut data: &[u8]) -> Result<(), ArchiveError> {
        while !data.is_empty() {
            let Some(space) = data.iter().position(|b| *b == b' ') else { return malformed("an extended header's record") };
            let length =
                data.get(..space).and_then(|d| std::str::from_utf8(d).ok()).filter(|d| d.bytes().all(|b| b.is_ascii_digit()));
            let length: usize = length.and_then(|d| d.parse().ok()).unwrap_or(0);
            // The shortest there is: "5 a=\n".
            let record = data.get(space + 1..length).filter(|_| length >= 5);
            let Some((b'\n', record)) = record.and_then(|r| r.split_last()) else {
                return malformed("an extended header's record");
            };
            let Some(equals) = record.iter().position(|b| *b == b'=') else { return malformed("an extended header's record") };
            let (key, value) = (record.get(..equals).unwrap_or_default(), record.get(equals + 1..).unwrap_or_default());
            data = data.get(length..).unwrap_or_default();
            self.pax_record(key, value)?;
        }
        Ok(())
    }

    fn pax_record(&mut self, key: &[u8], value: &[u8]) -> Result<(), ArchiveError> {
        if key.is_empty() || key.contains(&0) {
            return malformed("an extended header's key");
        }
        let digits = || std::str::from_utf8(value).unwrap_or("");
        let once = |taken: bool| if taken { malformed(format!("{} twice in an extended header", show(key))) } else { Ok(()) };
        match key {
            b"path" | b"linkpath" => {
                let slot = if key == b"path" { &mut self.name } else { &mut self.link };
                once(slot.is_some())?;
                if value.contains(&0) {
                    return malformed("a NUL in a name");
                }
                // An empty value takes the header's own.
                if !value.is_empty() {
                    *slot = Some(value.to_vec());
                }
            }
            b"size" => {
                once(self.size.is_some())?;
                if !value.is_empty() {
                    self.size = Some(decimal(digits(), "size")?);
                }
            }
            b"uid" if !value.is_empty() => self.uid = Some(narrow(decimal(digits(), "uid")?, "uid")?),
            b"gid" if !value.is_empty() => self.gid = Some(narrow(decimal(digits(), "gid")?, "gid")?),
            b"mtime" if !value.is_empty() => self.mtime = Some(pax_time(digits())?),
            b"atime" | b"ctime" if !value.is_empty() => drop(pax_time(digits())?),
            b"uname" | b"gname" if value.contains(&0) => return malformed("a NUL in an owner's name"),
            _ if key.starts_with(b"GNU.sparse.") => return malformed("sparse files are not supported"),
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.xattrs.retain(|(known, _)| known != name);
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Ok(())
    }
}

fn text(field: &[u8]) -> &[u8] {
    field.split(|b| *b == 0).next().unwrap_or_default()
}

/// For messages.
pub fn show(name: &[u8]) -> String {
    String::from_utf8_lossy(name).chars().take(200).flat_map(|c| c.escape_debug()).collect()
}

fn padding(size: u64) -> u64 {
    size.wrapping_neg() % BLOCK as u64
}

/// Octal, or base 256 with the high bit set; never negative.
fn number(field: &[u8], what: &str) -> Result<u64, ArchiveError> {
    match u64::try_from(signed(field, what)?) {
        Ok(n) => Ok(n),
        Err(_) => malformed(format!("a negative {what}")),
    }
}

fn signed(field: &[u8], what: &str) -> Result<i64, ArchiveError> {
    if field.first().is_some_and(|b| b & 0x80 != 0) {
        let negative = field.first().is_some_and(|b| b & 0x40 != 0);
        let mut value: i128 = if negative { -1 } else { 0 };
        for (at, byte) in field.iter().enumerate() {
            let byte = if at == 0 { if negative { byte | 0x80 } else { byte & 0x7f } } else { *byte };
            value = value << 8 | i128::from(byte);
        }
        return i64::try_from(value).or_else(|_| malformed(format!("a {what} that is out of range")));
    }
    // Spaces and NULs around the digits; what follows a NUL among them does not count.
    let blank = |b: &u8| matches!(b, b' ' | 0);
    let Some(start) = field.iter().position(|b| !blank(b)) else { return Ok(0) };
    let end = field.iter().rposition(|b| !blank(b)).map_or(field.len(), |at| at + 1);
    let digits = text(field.get(start..end).unwrap_or_default());
    let parsed = std::str::from_utf8(digits).ok().filter(|d| d.bytes().all(|b| b.is_ascii_digit()));
    match parsed.and_then(|d| i64::from_str_radix(d, 8).ok()) {
        Some(n) => Ok(n),
        None => malformed(format!("a {what} that is no number")),
    }
}

fn decimal(digits: &str, what: &str) -> Result<u64, ArchiveError> {
    match Some(digits).filter(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit())).and_then(|d| d.parse::<i64>().ok()) {
        Some(n) => Ok(n as u64),
        None => malformed(format!("a {what} that is no number")),
    }
}

fn narrow(number: u64, what: &str) -> Result<u32, ArchiveError> {
    match u32::try_from(number) {
        // The kernel takes the last one for "leave it as it is".
        Ok(n) if n != u32::MAX => Ok(n),
        _ => malformed(format!("a {what} that is out of range")),
    }
}

/// `-1.25`: seconds with a fraction of any length.
fn pax_time(text: &str) -> Result<(i64, u32), ArchiveError> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let negative = whole.starts_with('-');
    let seconds = whole.parse::<i64>().ok().filter(|_| !whole.starts_with('+') && fraction.bytes().all(|b| b.is_ascii_digit()));
    let Some(seconds) = seconds else { return malformed("an mtime that is no number") };
    let nanos: u32 = fraction.bytes().chain(std::iter::repeat(b'0')).take(9).fold(0, |n, b| n * 10 + u32::from(b - b'0'));
    if negative && nanos > 0 {
        return Ok((seconds.saturating_sub(1), 1_000_000_000 - nanos));
    }
    Ok((seconds, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_in_go() {
        assert_eq!(number(b"0000644\0", "x").unwrap(), 0o644);
        assert_eq!(number(b"   644 \0", "x").unwrap(), 0o644);
        assert_eq!(number(b"\0\0\0\0", "x").unwrap(), 0);
        assert_eq!(number(b"\x80\0\0\x01", "x").unwrap(), 1);
        assert_eq!(signed(b"\xff\xff\xff\xfe", "x").unwrap(), -2);
        assert!(number(b"\xff\xff\xff\xff", "x").is_err());
        assert!(number(b"0000648\0", "x").is_err());
        assert!(number(b"-000644\0", "x").is_err());
    }

    #[test]
    fn times_with_fractions() {
        assert_eq!(pax_time("1.5").unwrap(), (1, 500_000_000));
        assert_eq!(pax_time("-1.25").unwrap(), (-2, 750_000_000));
        assert_eq!(pax_time("12").unwrap(), (12, 0));
        assert_eq!(pax_time("1.1234567891").unwrap(), (1, 123_456_789));
        assert!(pax_time("x").is_err());
    }
}
