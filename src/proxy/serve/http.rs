//! hyper on smol's reactor: one connection of HTTP/1.1.
//!
//! Invariants: a request has a head of at most 16 KiB and 64 fields, which is there within 10 s of
//! the answer before it; a client that takes nothing of an answer for 10 s is gone; bodies are not
//! read. So whoever is slow, silent or away costs a descriptor and a few KiB, for that long.

use std::convert::Infallible;
use std::future::Future;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_io::{Async, Timer};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::rt::{ReadBufCursor, Sleep};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};

use super::pages::Answer;

const HEAD: usize = 16 << 10;
const FIELDS: usize = 64;
const PATIENCE: Duration = Duration::from_secs(10);
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// Until the client goes, or has to.
pub async fn connection(stream: Async<TcpStream>, answer: impl Fn(&str) -> Answer) {
    let service = service_fn(|request: Request<Incoming>| {
        let answer = match *request.method() {
            Method::GET | Method::HEAD => answer(request.uri().path()),
            _ => Answer::not_allowed(),
        };
        std::future::ready(Ok::<_, Infallible>(response(answer)))
    });
    let mut server = http1::Builder::new();
    server.timer(Clock).header_read_timeout(PATIENCE).max_headers(FIELDS).max_buf_size(HEAD);
    if let Err(e) = server.serve_connection(Wire { stream, stalled: None }, service).await {
        tracing::trace!(error = %e, "a client of the proxy's servers is gone");
    }
}

fn response(answer: Answer) -> Response<Page> {
    let Answer { code, kind, body, weight } = answer;
    let mut response = Response::new(Page(Some(body.into())));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(weight) = weight {
        headers.insert(WEIGHT, HeaderValue::from(weight));
    }
    response
}

/// A body that is there as a whole.
struct Page(Option<Bytes>);

impl Body for Page {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }
    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

/// The stream as hyper wants it.
struct Wire {
    stream: Async<TcpStream>,
    /// Runs while the client takes nothing.
    stalled: Option<Timer>,
}

impl hyper::rt::Read for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, mut into: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let mut bytes = [0; 2048];
        let most = bytes.len().min(into.remaining());
        loop {
            match self.stream.get_ref().read(bytes.get_mut(..most).unwrap_or_default()) {
                Ok(count) => {
                    into.put_slice(bytes.get(..count).unwrap_or_default());
                    return Poll::Ready(Ok(()));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => ready!(self.stream.poll_readable(cx))?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl hyper::rt::Write for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            match self.stream.get_ref().write(bytes) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if let Poll::Ready(writable) = self.stream.poll_writable(cx) {
                        writable?;
                        continue;
                    }
                    let timer = self.stalled.get_or_insert_with(|| Timer::after(PATIENCE));
                    ready!(Pin::new(timer).poll(cx));
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                done => {
                    self.stalled = None;
                    return Poll::Ready(done);
                }
            }
        }
    }

    /// The kernel has it.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.stream.get_ref().shutdown(std::net::Shutdown::Write))
    }
}

/// smol's timers as hyper wants them.
struct Clock;

struct Nap(Timer);

impl Future for Nap {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(cx).map(drop)
    }
}

impl Sleep for Nap {}

impl hyper::rt::Timer for Clock {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(Nap(Timer::after(duration)))
    }
    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        Box::pin(Nap(Timer::at(deadline)))
    }
}
