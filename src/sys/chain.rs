//! An error with its sources, on one line. It asks the kernel nothing; it stands here because
//! every room that tells errors may use `sys`, and one printer is enough.

use std::error::Error;
use std::fmt;

/// Each source once: `pull busybox: connect 10.0.0.1:443: timed out`.
pub fn chain<'a>(error: &'a (dyn Error + 'static)) -> Chain<'a> {
    Chain(error)
}

/// See [`chain`].
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a>(&'a (dyn Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut next = self.0.source();
        while let Some(error) = next {
            let text = error.to_string();
            // Foreign errors often repeat their source in their own text.
            if !text.is_empty() && !said.contains(&text) {
                write!(f, ": {text}")?;
                said = text;
            }
            next = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("open {0}")]
    struct Outer(&'static str, #[source] std::io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("start: {0}")]
    struct Repeats(#[source] Outer);

    #[test]
    fn a_chain_names_every_source_once() {
        let outer = || Outer("/x", std::io::Error::other("no such file"));
        assert_eq!(chain(&outer()).to_string(), "open /x: no such file");
        assert_eq!(chain(&Repeats(outer())).to_string(), "start: open /x: no such file");
    }
}
