//! What other processes and the kernel send: monitor packets, local socket frames, netlink.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use coracle::kubelet::server::{MAX_ANSWER, MAX_REQUEST, model, receive, send};
use coracle::runtime::monitor::wire::{Failure, Frame, MAX_MESSAGE, Reply, Request};
use coracle::sys::conntrack::Flow;
use coracle::sys::netlink;
use coracle::sys::nftables::{ChainSeen, ElementSeen, RuleSeen, events as changes};
use coracle::sys::{rtnl, uevent as events};

/// What is understood is sent as something that is understood the same; the rest is a short error.
pub fn monitor(data: &[u8]) {
    let frame = match Frame::parse(data) {
        Ok(frame) => frame,
        Err(e) => return assert!(Failure::from(e).message.len() <= MAX_MESSAGE),
    };
    match Request::decode(&frame) {
        Ok(request) => {
            if let Ok(bytes) = request.encode(frame.id) {
                let again = Frame::parse(&bytes).expect("our own frame");
                assert_eq!((again.id, again.kind), (frame.id, request.kind()));
                assert_eq!(Request::decode(&again).expect("our own request"), request);
            }
        }
        Err(e) => assert!(Failure::from(e).message.len() <= MAX_MESSAGE),
    }
    if let Ok(reply) = Reply::decode(&frame)
        && let Ok(bytes) = reply.encode(frame.id)
    {
        let again = Frame::parse(&bytes).expect("our own frame");
        assert_eq!(Reply::decode(&again).expect("our own reply"), reply);
    }
}

/// A peer's bytes through a real socket: frames until the end or an error, never more than allowed.
pub fn socket(data: &[u8]) {
    let (peer, ours) = UnixStream::pair().expect("a socket pair");
    let data = &data[..data.len().min(16 << 10)];
    let framed = data.first() == Some(&b'{');
    if framed {
        send(&peer, data, &[]).expect("room for a frame");
    } else {
        std::io::Write::write_all(&mut &peer, data).expect("room for the bytes");
    }
    peer.shutdown(Shutdown::Write).expect("shutdown");
    let mut first = true;
    while let Ok(Some((payload, fds))) = receive(&ours, MAX_REQUEST, None) {
        assert!(payload.len() <= MAX_REQUEST && fds.is_empty());
        assert!(!(framed && first) || payload == data);
        first = false;
        if let Ok(request) = serde_json::from_slice::<model::Request>(&payload) {
            let bytes = serde_json::to_vec(&request).expect("our own request");
            let again: model::Request = serde_json::from_slice(&bytes).expect("is read again");
            assert_eq!(serde_json::to_vec(&again).expect("our own request"), bytes);
        }
        if let Ok(answer) = serde_json::from_slice::<model::Answer>(&payload) {
            assert!(serde_json::to_vec(&answer).expect("our own answer").len() <= MAX_ANSWER);
        }
    }
    assert!(!(framed && first), "a whole frame was not received");
}

/// Whatever a datagram holds: decoders stay inside it, and end.
pub fn netlink(data: &[u8]) {
    changes(data).for_each(drop);
    for (_, payload) in netlink::messages(data) {
        assert!(payload.len() <= data.len());
        drop((ChainSeen::read(payload), RuleSeen::read(payload), Flow::read(payload), rtnl::parse_link(payload)));
        let held: usize = ElementSeen::each(payload).map(|e| e.key.len() + e.userdata.len()).sum();
        assert!(held <= payload.len());
    }
    for (kind, value) in netlink::attributes(data) {
        assert!(value.len() <= data.len());
        assert!(netlink::attribute(data, kind).is_some());
        netlink::text(value);
    }
}

pub fn uevent(data: &[u8]) {
    if let Some((action, path)) = events::parse(data) {
        assert!(!action.contains(['@', '\0']) && !path.contains('\0'));
    }
}
