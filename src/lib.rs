//! coracle: a Kubernetes node in one file.
//!
//! One static binary does what kubelet, containerd with runc and its shims, a bridge CNI and
//! kube-proxy do together. It runs *joined* to any conformant API server or *alone* from a
//! directory of manifests; everything below the source of objects is the same code.
//!
//! # Processes
//!
//! ```text
//! coracle agent                  many threads; never calls libcontainer, never forks without exec
//!  ├─ coracle monitor ns/pod     one a pod, one thread; parent of all of the pod's processes
//!  │    ├─ (helper)              a fork for each libcontainer call, gone when the call is done
//!  │    └─ container init …      children of the monitor, exec'd processes too
//!  └─ coracle unpack             one a layer being unpacked: confined, then gone
//! coracle pods|logs|exec|…       short-lived clients of the agent's unix socket
//! ```
//!
//! The agent may die at any moment: monitors own stdio, logs and exit codes and outlive it.
//!
//! # Rooms
//!
//! Data runs one way: sources give the DESIRED set; `plan` (pure) compares it with what is
//! OBSERVED and returns actions; `apply` carries one action out and decides nothing; `observe`
//! reads kernel and disk again. A second pass over an unchanged world plans nothing.
//!
//! | room | job | may use |
//! |---|---|---|
//! | [`kubelet`] | pods: source, plan, worker, status, local server | all rooms, api, store |
//! | [`runtime`] | sandboxes and containers: OCI spec, monitor, logs, cgroups | sys, store |
//! | [`net`] | bridge, addresses, host ports, resolv.conf and hosts texts | sys, store, api |
//! | [`proxy`] | Services, host ports, network policies: one nftables table a family | sys, store, api |
//! | [`dns`] | the node's DNS server | sys, api, proxy::model |
//! | [`images`] | references, registries, layers, the image store | sys, store |
//! | [`volumes`] | contents to files and mounts | sys, store, api |
//! | [`api`] | the Kubernetes objects, exactly the fields we honour; YAML | – |
//! | [`store`] | crash-safe records | sys |
//! | [`sys`] | thin typed system call wrappers, the only `unsafe` | – |
//! | [`obs`] | logs, sd_notify | api, sys |
//! | [`config`] | flags to roots, names and limits, parsed once | api |
//! | [`cli`] | one file a verb; wires rooms together | everything |
//!
//! `tests/layers.rs` holds this table against every `crate::` path.

pub mod api;
pub mod cli;
pub mod config;
pub mod dns;
pub mod images;
pub mod kubelet;
pub mod net;
pub mod obs;
pub mod proxy;
pub mod runtime;
pub mod store;
pub mod sys;
pub mod volumes;
