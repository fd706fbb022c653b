//! Who holds a port that we cannot have.
//!
//! Invariant: it only reads; what it cannot find out (another namespace's process, no right to
//! look) it does not guess. proc(5): /proc/net/udp, /proc/PID/fd.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

/// `dnsmasq (pid 812)`, the first process that has a socket on this port of `ip` or of all
/// addresses.
pub fn of_port(ip: IpAddr, port: u16) -> Option<String> {
    let inodes: Vec<u64> = ["udp", "udp6", "tcp", "tcp6"]
        .iter()
        .filter_map(|table| std::fs::read_to_string(format!("/proc/thread-self/net/{table}")).ok()) // no IPv6: no table
        .flat_map(|text| inodes(&text, ip, port))
        .collect();
    if inodes.is_empty() {
        return None;
    }
    let links: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    processes.filter(|p| p.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit())).find_map(|process| {
        // Processes end while we look; those are not the holder.
        let mut fds = std::fs::read_dir(process.path().join("fd")).ok()?.flatten();
        fds.find(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| links.iter().any(|link| to == Path::new(link))))?;
        let name = std::fs::read_to_string(process.path().join("comm")).ok()?;
        Some(format!("{} (pid {})", name.trim(), process.file_name().to_string_lossy()))
    })
}

/// Sockets of one of the kernel's tables that are in the way. TCP's count where they listen.
fn inodes(table: &str, ip: IpAddr, port: u16) -> Vec<u64> {
    let row = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (address, number) = columns.get(1)?.split_once(':')?;
        let local = address_of(address)?;
        let all = local.is_unspecified() && (local.is_ipv6() || ip.is_ipv4());
        // 07: TCP_CLOSE, what UDP's bound sockets are in; 01: a connected UDP socket; 0A: listening.
        let open = matches!(*columns.get(3)?, "07" | "01" | "0A");
        let ours = u16::from_str_radix(number, 16) == Ok(port) && open && (local == ip || all);
        ours.then(|| columns.get(9)?.parse().ok()).flatten()
    };
    table.lines().skip(1).filter_map(row).collect()
}

/// The kernel prints each 32-bit word of an address as a number of this machine.
fn address_of(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(hex.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match hex.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?].concat();
            Some(Ipv6Addr::from(<[u8; 16]>::try_from(words).ok()?).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_bound_port_is_found_and_of_a_free_one_nobody() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let found = of_port(Ipv4Addr::LOCALHOST.into(), port).unwrap();
        assert!(found.ends_with(&format!("(pid {})", std::process::id())), "{found}");
        assert_eq!(of_port("127.0.0.9".parse().unwrap(), port), None, "another address is no obstacle");
        drop(socket);
        let everywhere = std::net::TcpListener::bind("[::]:0").unwrap();
        let port = everywhere.local_addr().unwrap().port();
        assert!(of_port(Ipv4Addr::LOCALHOST.into(), port).is_some());
    }

    #[test]
    fn a_table_of_anything_is_read_without_harm() {
        assert_eq!(
            inodes("head\n 1: zz:0035 x 07\n\n2: 0100007F:0035\n3: 0100007F0:0035 0 07 0 0 0 0 0 12", ip(), 53),
            Vec::<u64>::new()
        );
    }

    fn ip() -> IpAddr {
        Ipv4Addr::LOCALHOST.into()
    }
}
