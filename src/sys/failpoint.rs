//! Failpoints: named places where a test makes the next step fail or the process die.
//!
//! `CORACLE_FAILPOINTS="name=action[@N],…"` arms them for a process and its children; the action
//! happens at the N-th hit of the name in that process (1 is meant without `@N`) and only then.
//! Actions: `error` (EIO), `enospc` (ENOSPC), `kill` (SIGKILL to ourselves), `sleep:MS`.
//! `CORACLE_FAILPOINTS_TRACE=FILE` gets one line a hit, `pid name`, so that a driver knows what was reached.
//!
//! A name is `room.verb.step` and stands at one place of the source; `tests/store.rs` reads all
//! of them out of the source and holds them to that. Without the cargo feature `failpoints`
//! a call is nothing. Source: the idea of fail(9).

/// A place that may fail. Call it right after the step that it is named for.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn hit(_name: &'static str) -> std::io::Result<()> {
    Ok(())
}

#[cfg(feature = "failpoints")]
pub use armed::hit;

#[cfg(feature = "failpoints")]
#[allow(clippy::panic)] // a test that arms or traces nothing by mistake would prove nothing
mod armed {
    use std::io::{self, Write};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use nix::errno::Errno;
    use nix::sys::signal::{Signal, kill};

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Action {
        Fail(Errno),
        Kill,
        Sleep(u64),
    }

    #[derive(Debug)]
    struct Armed {
        name: String,
        action: Action,
        at: u64,
        hits: AtomicU64,
    }

    /// The environment is read once: nothing of ours changes it.
    fn armed() -> &'static [Armed] {
        static ARMED: OnceLock<Vec<Armed>> = OnceLock::new();
        ARMED.get_or_init(|| match parse(&std::env::var("CORACLE_FAILPOINTS").unwrap_or_default()) {
            Ok(armed) => armed,
            Err(bad) => panic!("CORACLE_FAILPOINTS: \"{bad}\" is not name=error|enospc|kill|sleep:MS[@N]"),
        })
    }

    fn parse(text: &str) -> Result<Vec<Armed>, String> {
        let parts = text.split([',', ';']).map(str::trim).filter(|p| !p.is_empty());
        parts.map(|part| parse_one(part).ok_or_else(|| part.to_owned())).collect()
    }

    fn parse_one(part: &str) -> Option<Armed> {
        let (name, rest) = part.split_once('=')?;
        let (action, at) = match rest.split_once('@') {
            Some((action, at)) => (action, at.parse().ok().filter(|n| *n > 0)?),
            None => (rest, 1),
        };
        let action = match action {
            "error" => Action::Fail(Errno::EIO),
            "enospc" => Action::Fail(Errno::ENOSPC),
            "kill" => Action::Kill,
            other => Action::Sleep(other.strip_prefix("sleep:")?.parse().ok()?),
        };
        Some(Armed { name: name.to_owned(), action, at, hits: AtomicU64::new(0) })
    }

    pub fn hit(name: &'static str) -> io::Result<()> {
        trace(name);
        for point in armed().iter().filter(|p| p.name == name) {
            if point.hits.fetch_add(1, Ordering::Relaxed) + 1 != point.at {
                continue;
            }
            eprintln!("failpoint {name}: {:?}", point.action);
            match point.action {
                Action::Fail(errno) => return Err(errno.into()),
                Action::Sleep(ms) => std::thread::sleep(Duration::from_millis(ms)),
                Action::Kill => {
                    kill(nix::unistd::getpid(), Signal::SIGKILL)?;
                    loop {
                        std::thread::park();
                    }
                }
            }
        }
        Ok(())
    }

    fn trace(name: &str) {
        let Some(path) = std::env::var_os("CORACLE_FAILPOINTS_TRACE") else { return };
        let line = format!("{} {name}\n", std::process::id());
        // One write of one short line to a file opened for append is not torn by other processes.
        let written = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        if let Err(e) = written.and_then(|mut file| file.write_all(line.as_bytes())) {
            panic!("CORACLE_FAILPOINTS_TRACE {}: {e}", path.display());
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_list_is_read_whole_or_refused() {
            let armed = parse("a.b.c=error@3; d.e.f=kill,g.h.i=sleep:20,").unwrap();
            let read: Vec<_> = armed.iter().map(|p| (p.name.as_str(), p.action, p.at)).collect();
            let expected = [("a.b.c", Action::Fail(Errno::EIO), 3), ("d.e.f", Action::Kill, 1), ("g.h.i", Action::Sleep(20), 1)];
            assert_eq!(read, expected);
            for bad in ["a.b.c", "a.b.c=boom", "a.b.c=error@0", "a.b.c=sleep:x"] {
                assert_eq!(parse(bad).unwrap_err(), bad);
            }
        }
    }
}
