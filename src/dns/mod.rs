//! The node's DNS server: names of Services and pods, and a cache for the rest.
