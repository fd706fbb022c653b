//! From a layer's compressed bytes to its tar bytes: gzip, zstd or plain, told by the first bytes
//! and never by a media type, with limits on the window and on how far it may swell.
//!
//! Invariant: no frame is decoded before its header showed a window within the limit. RFC 1952
//! (several members are one stream), RFC 8878 (frames and skippable frames).

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

const BUFFER: usize = 64 * 1024;

/// What of `Limits` a decoder watches.
#[derive(Clone, Copy, Debug)]
pub struct DecodeLimits {
    pub bytes: u64,
    pub ratio: u64,
    /// Below this many unpacked bytes the ratio says nothing.
    pub ratio_floor: u64,
    pub window: u64,
}

/// Decompresses `input` by its magic number.
pub fn decompress<'r>(input: impl Read + 'r, limits: DecodeLimits) -> io::Result<Box<dyn Read + 'r>> {
    let taken = Rc::new(Cell::new(0));
    let mut input = BufReader::with_capacity(BUFFER, Counted { inner: input, count: taken.clone() });
    let magic = peek(&mut input)?;
    let plain: Box<dyn Read> = match magic {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
        [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => Box::new(ZstdReader::new(input, limits.window)),
        [b'B', b'Z', b'h', _] => return Err(unsupported("bzip2")),
        [0xfd, b'7', b'z', b'X'] => return Err(unsupported("xz")),
        _ => return Ok(Box::new(Limited { inner: input, taken: None, given: 0, limits })),
    };
    Ok(Box::new(Limited { inner: plain, taken: Some(taken), given: 0, limits }))
}

fn unsupported(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("compressed with {what}, which is not supported: use gzip or zstd"))
}

/// The first four bytes, left in the buffer; zeros where the stream is shorter.
fn peek(input: &mut impl BufRead) -> io::Result<[u8; 4]> {
    let mut magic = [0; 4];
    let bytes = loop {
        match input.fill_buf() {
            Ok(bytes) => break bytes,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    };
    for (to, from) in magic.iter_mut().zip(bytes) {
        *to = *from;
    }
    Ok(magic)
}

struct Counted<R> {
    inner: R,
    count: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.count.set(self.count.get() + n as u64);
        Ok(n)
    }
}

/// Stops at too many bytes and at too many bytes for what came in.
struct Limited<R> {
    inner: R,
    taken: Option<Rc<Cell<u64>>>,
    given: u64,
    limits: DecodeLimits,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.given += n as u64;
        if self.given > self.limits.bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it unpacks to more than {} bytes", self.limits.bytes),
            ));
        }
        if let Some(taken) = &self.taken
            && self.given > self.limits.ratio_floor
            && self.given / taken.get().max(1) > self.limits.ratio
        {
            let why = format!("it unpacks to more than {} times its size", self.limits.ratio);
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(n)
    }
}

/// All frames of a zstd stream, one after the other.
struct ZstdReader<R> {
    input: R,
    decoder: FrameDecoder,
    inside: bool,
}

impl<R: BufRead> ZstdReader<R> {
    fn new(input: R, window: u64) -> ZstdReader<R> {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(window);
        ZstdReader { input, decoder, inside: false }
    }

    /// Begins the next frame; false at the stream's end.
    fn begin(&mut self) -> io::Result<bool> {
        loop {
            if self.input.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.reset(&mut self.input) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    let skipped = io::copy(&mut (&mut self.input).take(length.into()), &mut io::sink())?;
                    if skipped < u64::from(length) {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(FrameDecoderError::WindowSizeTooBig { requested, max }) => {
                    let why = format!("its zstd window of {requested} bytes is above the limit of {max}");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, why));
                }
                Err(e) => return Err(io::Error::new(io::ErrorKind::InvalidData, format!("zstd: {e}"))),
            }
        }
    }
}

impl<R: BufRead> Read for ZstdReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.inside {
                if !self.begin()? {
                    return Ok(0);
                }
                self.inside = true;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let decoded = self.decoder.decode_blocks(&mut self.input, BlockDecodingStrategy::UptoBlocks(1));
                decoded.map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("zstd: {e}")))?;
            }
            let n = self.decoder.read(buffer)?;
            if n > 0 {
                return Ok(n);
            }
            if self.decoder.is_finished() {
                let (want, have) = (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum());
                if want.is_some() && want != have {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "zstd: a frame's checksum is wrong"));
                }
                self.inside = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const LIMITS: DecodeLimits = DecodeLimits { bytes: 1 << 40, ratio: 100, ratio_floor: 1 << 20, window: 8 << 20 };

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    fn all(input: &[u8], limits: DecodeLimits) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        decompress(input, limits)?.read_to_end(&mut out)?;
        Ok(out)
    }

    #[test]
    fn several_members_are_one_stream() {
        let both = [gzip(b"one "), gzip(b"two")].concat();
        assert_eq!(all(&both, LIMITS).unwrap(), b"one two");
        assert!(all(&[gzip(b"one"), b"junk".to_vec()].concat(), LIMITS).is_err());
        assert!(all(&gzip(b"cut off")[..15], LIMITS).is_err());
    }

    #[test]
    fn frames_and_skippable_frames_are_one_stream() {
        let frame = |data: &[u8]| ruzstd::encoding::compress_to_vec(data, ruzstd::encoding::CompressionLevel::Fastest);
        let skip = [&0x184D_2A51u32.to_le_bytes()[..], &3u32.to_le_bytes(), b"abc"].concat();
        let stream = [frame(b"one "), skip.clone(), frame(b"two"), skip].concat();
        assert_eq!(all(&stream, LIMITS).unwrap(), b"one two");
        assert!(all(&frame(&[7; 1000])[..8], LIMITS).is_err());
    }

    #[test]
    fn a_window_above_the_limit_is_refused_by_its_header() {
        // Magic, descriptor without single segment, window descriptor for 2^(10+20) bytes.
        let header = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 20 << 3, 0, 0, 0];
        let error = all(&header, LIMITS).unwrap_err().to_string();
        assert!(error.contains("window"), "{error}");
    }

    #[test]
    fn bombs_stop() {
        let error = all(&gzip(&vec![0; 10 << 20]), LIMITS).unwrap_err().to_string();
        assert!(error.contains("100 times"), "{error}");
        let few = DecodeLimits { bytes: 1000, ..LIMITS };
        assert!(all(&gzip(&[1; 1001]), few).is_err());
        assert!(all(&[1; 1001], few).is_err());
        assert_eq!(all(&[1; 1000], few).unwrap().len(), 1000);
    }
}
