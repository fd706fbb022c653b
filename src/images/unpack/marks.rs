//! What a layer's unpacking leaves to be done: a file beside the layer, so that neither process
//! keeps a list in memory.
//!
//! `T` a directory's time (set last, by the child itself); `I` a directory that the layer only
//! implied; `W` a whiteout; `O` an opaque directory: these three need the layers below, or a
//! capability that the child gave up, and are for `finish`.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    Time { path: Vec<u8>, seconds: i64, nanos: u32 },
    Implied(Vec<u8>),
    Whiteout(Vec<u8>),
    Opaque(Vec<u8>),
}

pub struct MarkWriter(BufWriter<File>);

impl MarkWriter {
    pub fn new(file: File) -> MarkWriter {
        MarkWriter(BufWriter::new(file))
    }

    pub fn write(&mut self, mark: &Mark) -> io::Result<()> {
        match mark {
            Mark::Time { path, seconds, nanos } => {
                write!(self.0, "T{seconds} {nanos} ")?;
                self.0.write_all(path)?;
            }
            Mark::Implied(path) => self.tagged(b'I', path)?,
            Mark::Whiteout(path) => self.tagged(b'W', path)?,
            Mark::Opaque(path) => self.tagged(b'O', path)?,
        }
        self.0.write_all(&[0])
    }

    fn tagged(&mut self, tag: u8, path: &[u8]) -> io::Result<()> {
        self.0.write_all(&[tag])?;
        self.0.write_all(path)
    }

    pub fn into_reader(self) -> io::Result<MarkReader<File>> {
        let mut file = self.0.into_inner().map_err(|e| e.into_error())?;
        file.seek(SeekFrom::Start(0))?;
        Ok(MarkReader::new(file))
    }
}

pub struct MarkReader<R>(BufReader<R>);

impl<R: Read> MarkReader<R> {
    pub fn new(file: R) -> MarkReader<R> {
        MarkReader(BufReader::new(file))
    }

    fn record(&mut self) -> io::Result<Option<Mark>> {
        let mut record = Vec::new();
        // 256 parts of 255 bytes, and numbers: anything longer was not written by us.
        (&mut self.0).take(70_000).read_until(0, &mut record)?;
        if record.is_empty() {
            return Ok(None);
        }
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "a broken list of marks");
        let (tag, path) = record.split_first().ok_or_else(bad)?;
        let path = path.strip_suffix(&[0]).ok_or_else(bad)?;
        Ok(Some(match tag {
            b'I' => Mark::Implied(path.to_vec()),
            b'W' => Mark::Whiteout(path.to_vec()),
            b'O' => Mark::Opaque(path.to_vec()),
            b'T' => {
                let mut fields = path.splitn(3, |b| *b == b' ');
                let mut field = || fields.next().ok_or_else(bad);
                let number = |f: &[u8]| std::str::from_utf8(f).ok().and_then(|t| t.parse::<i64>().ok()).ok_or_else(bad);
                let (seconds, nanos) = (number(field()?)?, number(field()?)?);
                Mark::Time { path: field()?.to_vec(), seconds, nanos: u32::try_from(nanos).map_err(|_| bad())? }
            }
            _ => return Err(bad()),
        }))
    }
}

impl<R: Read> Iterator for MarkReader<R> {
    type Item = io::Result<Mark>;
    fn next(&mut self) -> Option<io::Result<Mark>> {
        self.record().transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let marks = [
            Mark::Time { path: b"a b/c".to_vec(), seconds: -5, nanos: 7 },
            Mark::Implied(b"a".to_vec()),
            Mark::Whiteout(b"\xff/x".to_vec()),
            Mark::Opaque(Vec::new()),
        ];
        let mut writer = MarkWriter::new(tempfile::tempfile().unwrap());
        marks.iter().for_each(|m| writer.write(m).unwrap());
        let read: Vec<Mark> = writer.into_reader().unwrap().map(Result::unwrap).collect();
        assert_eq!(read, marks);
        for broken in [&b"Ipath"[..], b"Z\0", b"Tx y z\0", b"T1 2\0", b"\0"] {
            assert!(MarkReader::new(broken).next().unwrap().is_err());
        }
    }
}
