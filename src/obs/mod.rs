//! Logs: one line per change of state on stderr, made for the journal or as JSON.
