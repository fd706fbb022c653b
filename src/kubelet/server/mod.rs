//! The agent's local socket: `<run>/agent.sock`, mode 0600, root or the agent's own user only.
//!
//! Invariant: clients cost the agent a bounded number of threads, bytes and seconds, however many
//! there are and whatever they send; an honest client is served beside hostile ones. What is
//! answered comes from [`Agent`]; this room decides nothing about pods.

mod frame;
pub mod model;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

pub use frame::{Frame, FrameError, MAX_ANSWER, MAX_REQUEST, receive, send};
use model::{AgentInfo, ExecAsk, Failure, ImageView, PodView, ProblemView};

/// What the server asks of the agent. Every call may block its own thread, none the planner.
pub trait Agent: Send + Sync + 'static {
    /// All pods, sorted by namespace and name; `manifest` stays None.
    fn pods(&self) -> Vec<PodView>;
    fn problems(&self) -> Vec<ProblemView>;
    /// A pod's manifest as JSON, as received, read from disk.
    fn manifest(&self, uid: &str) -> Result<Vec<u8>, Failure>;
    fn info(&self) -> AgentInfo;
    /// Starts a process in a running container.
    fn exec(&self, ask: &ExecAsk) -> Result<Started, Failure>;
    fn images(&self) -> Result<Vec<ImageView>, Failure>;
    fn pull(&self, reference: &str, username: &str, password: &str) -> Result<ImageView, Failure>;
    fn import(&self, path: &str, name: Option<&str>) -> Result<Vec<ImageView>, Failure>;
    /// Ends all pods within `bound` and starts none from then on. `say` gets a line a pod.
    fn stop_all(&self, bound: Duration, say: &mut dyn FnMut(String)) -> Result<(), Failure>;
}

/// A process that was started by [`Agent::exec`].
pub struct Started {
    pub streams: Streams,
    pub process: Arc<dyn Process>,
}

/// Our ends of its standard streams; they go to the client, not through the agent.
pub enum Streams {
    Pipes { stdin: Option<OwnedFd>, stdout: OwnedFd, stderr: OwnedFd },
    Terminal(OwnedFd),
}

pub trait Process: Send + Sync {
    /// Blocks until it has ended; 0 to 255, 128 + signal where a signal ended it.
    fn wait(&self) -> Result<i32, Failure>;
    fn resize(&self, rows: u16, columns: u16) -> Result<(), Failure>;
    fn signal(&self, number: i32) -> Result<(), Failure>;
}
