//! Where an entry's name puts it, and which names are whiteouts. Pure.
//!
//! Invariant: a [`Place`] has only parts that are no `..`, hold no `/` and fit a directory entry.
//! image-spec layer.md, "Whiteouts".

/// Deeper trees are refused: removing them would need more fds than a process has.
pub const MAX_DEPTH: usize = 256;
const MAX_PART: usize = 255;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place<'n> {
    /// The layer's root itself.
    Root,
    At {
        parents: Vec<&'n [u8]>,
        name: &'n [u8],
    },
    /// `.wh.name`: hides `name` of the layers below.
    Whiteout {
        parents: Vec<&'n [u8]>,
        name: &'n [u8],
    },
    /// `.wh..wh..opq`: hides all that the layers below have in this directory.
    Opaque {
        dir: Vec<&'n [u8]>,
    },
    /// Book-keeping of AUFS (`.wh..wh.plnk`…), no part of the image.
    Skip,
}

/// The parts of a path below the layer's root: a leading `/` and `.` mean nothing, `..` is refused.
pub fn parts(name: &[u8]) -> Result<Vec<&[u8]>, &'static str> {
    let parts: Vec<&[u8]> = name.split(|b| *b == b'/').filter(|p| !matches!(*p, b"" | b".")).collect();
    if parts.len() > MAX_DEPTH {
        return Err("it lies deeper than 256 directories");
    }
    for part in &parts {
        if *part == b".." {
            return Err("it has a part \"..\"");
        }
        if part.len() > MAX_PART {
            return Err("it has a part of more than 255 bytes");
        }
        if part.contains(&0) {
            return Err("it holds a NUL");
        }
    }
    Ok(parts)
}

pub fn place(name: &[u8]) -> Result<Place<'_>, &'static str> {
    let mut parts = parts(name)?;
    let Some(last) = parts.pop() else { return Ok(Place::Root) };
    if parts.iter().any(|p| p.starts_with(b".wh..wh.")) {
        return Ok(Place::Skip);
    }
    if parts.iter().any(|p| p.starts_with(b".wh.")) {
        return Err("it lies below a whiteout");
    }
    if last == b".wh..wh..opq" {
        return Ok(Place::Opaque { dir: parts });
    }
    if last.starts_with(b".wh..wh.") {
        return Ok(Place::Skip);
    }
    match last.strip_prefix(b".wh.") {
        Some(b"" | b"." | b"..") => Err("it is a whiteout of no name"),
        Some(name) => Ok(Place::Whiteout { parents: parts, name }),
        None => Ok(Place::At { parents: parts, name: last }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at<'n>(parents: &[&'n str], name: &'n str) -> Place<'n> {
        Place::At { parents: parents.iter().map(|p| p.as_bytes()).collect(), name: name.as_bytes() }
    }

    #[test]
    fn places() {
        assert_eq!(place(b"a"), Ok(at(&[], "a")));
        assert_eq!(place(b"/a/b"), Ok(at(&["a"], "b")));
        assert_eq!(place(b"./a//./b/"), Ok(at(&["a"], "b")));
        assert_eq!(place(b""), Ok(Place::Root));
        assert_eq!(place(b"./"), Ok(Place::Root));
        assert_eq!(place(b"/"), Ok(Place::Root));
        assert_eq!(place(b"a/.wh.b"), Ok(Place::Whiteout { parents: vec![b"a"], name: b"b" }));
        assert_eq!(place(b".wh..wh..opq"), Ok(Place::Opaque { dir: vec![] }));
        assert_eq!(place(b"a/.wh..wh..opq"), Ok(Place::Opaque { dir: vec![b"a"] }));
        assert_eq!(place(b".wh..wh.plnk/1.2"), Ok(Place::Skip));
        assert_eq!(place(b".wh..wh.aufs"), Ok(Place::Skip));
        assert_eq!(place(b"...."), Ok(at(&[], "....")));
        assert_eq!(place(b".wh.\xff"), Ok(Place::Whiteout { parents: vec![], name: b"\xff" }));
    }

    #[test]
    fn refused() {
        for name in [&b"../x"[..], b"a/../x", b"a/..", b"..", b"/..", b".wh.", b".wh..", b".wh...", b"a/.wh...", b".wh.x/y"] {
            assert!(place(name).is_err(), "{:?}", String::from_utf8_lossy(name));
        }
        assert!(place(&[b'a'; 256]).is_err());
        assert!(place(&[b'a'; 255]).is_ok());
        assert!(place(&b"a/".repeat(257)).is_err());
        assert!(place(&b"a/".repeat(256)).is_ok());
    }
}
