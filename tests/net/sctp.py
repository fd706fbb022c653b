#!/usr/bin/env python3
"""SCTP's two ends for tests/net: a server that says who it is and whom it sees, and a client.

  sctp.py serve NAME ADDRESS PORT     answers until its standard input ends; says "up" first
  sctp.py ask ADDRESS PORT            prints the answer, or TimedOut

Where the kernel speaks SCTP its own sockets are used. Where it does not (the module is missing),
both ends make the packets of an association's start themselves (RFC 9260 section 5.1: INIT, INIT
ACK, COOKIE ECHO, COOKIE ACK) over raw sockets, with checksums that are checked: to the host in
between they are SCTP all the same. The answer travels as the state cookie.
"""
import os
import select
import socket
import struct
import sys
import time

SCTP = 132
INIT, INIT_ACK, COOKIE_ECHO, COOKIE_ACK, STATE_COOKIE = 1, 2, 10, 11, 7


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def packet(source, target, tag, kind, value):
    chunk = struct.pack(">BBH", kind, 0, 4 + len(value)) + value
    chunk += bytes(-len(chunk) % 4)
    head = struct.pack(">HHI", source, target, tag)
    return head + struct.pack("<I", crc32c(head + bytes(4) + chunk)) + chunk


def parse(data, v4):
    """Ports, tag, kind and value of the first chunk; None where it is no whole SCTP packet."""
    if v4:
        data = data[(data[0] & 15) * 4:]
    if len(data) < 16:
        return None
    source, target, tag = struct.unpack(">HHI", data[:8])
    if struct.unpack("<I", data[8:12])[0] != crc32c(data[:8] + bytes(4) + data[12:]):
        return None
    kind, _, length = struct.unpack(">BBH", data[12:16])
    return source, target, tag, kind, data[16:12 + length]


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def kernel_speaks():
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, SCTP).close()
        return True
    except OSError:
        return False


def readable(sock, until):
    left = until - time.monotonic()
    return left > 0 and sock in select.select([sock], [], [], left)[0]


def serve(name, address, port):
    sock = socket.socket(family(address), socket.SOCK_STREAM if kernel_speaks() else socket.SOCK_RAW, SCTP)
    if kernel_speaks():
        sock.bind((address, port))
        sock.listen()
    else:
        sock.bind((address, 0))
    print("up", flush=True)
    while True:
        ready = select.select([sock, sys.stdin], [], [])[0]
        if sys.stdin in ready:
            return
        if kernel_speaks():
            stream, peer = sock.accept()
            stream.sendall(f"{name} {peer[0]}".encode())
            stream.close()
            continue
        data, peer = sock.recvfrom(2048)
        got = parse(data, sock.family == socket.AF_INET)
        if got is None or got[1] != port:
            continue
        client, _, _, kind, value = got
        tag = struct.unpack(">I", value[:4])[0] if len(value) >= 4 else 0
        if kind == INIT:
            cookie = struct.pack(">I", tag) + f"{name} {peer[0]}".encode()
            parameter = struct.pack(">HH", STATE_COOKIE, 4 + len(cookie)) + cookie
            value = struct.pack(">IIHHI", 0x5EC0DE, 65536, 1, 1, 1) + parameter
            sock.sendto(packet(port, client, tag, INIT_ACK, value), (peer[0], 0))
        elif kind == COOKIE_ECHO:
            sock.sendto(packet(port, client, tag, COOKIE_ACK, b""), (peer[0], 0))


def ask(address, port, seconds=2.0):
    until = time.monotonic() + seconds
    if kernel_speaks():
        with socket.socket(family(address), socket.SOCK_STREAM, SCTP) as sock:
            sock.settimeout(seconds)
            sock.connect((address, port))
            return sock.recv(64).decode()
    sock = socket.socket(family(address), socket.SOCK_RAW, SCTP)
    tag = int.from_bytes(os.urandom(4), "big") | 1
    own = 32768 + int.from_bytes(os.urandom(2), "big") % 28000
    init = struct.pack(">IIHHI", tag, 65536, 1, 1, 1)
    sock.sendto(packet(own, port, 0, INIT, init), (address, 0))
    answer = None
    while readable(sock, until):
        got = parse(sock.recv(2048), sock.family == socket.AF_INET)
        # From the port that was asked and with our tag, or it is not the answer.
        if got is None or got[:3] != (port, own, tag):
            continue
        if got[3] == INIT_ACK:
            theirs = struct.unpack(">I", got[4][:4])[0]
            cookie = got[4][16 + 4:]
            answer = cookie[4:].decode()
            sock.sendto(packet(own, port, theirs, COOKIE_ECHO, cookie), (address, 0))
        elif got[3] == COOKIE_ACK and answer:
            return answer
    raise socket.timeout


if sys.argv[1] == "serve":
    serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
else:
    try:
        print(ask(sys.argv[2], int(sys.argv[3])))
    except socket.timeout:
        print("TimedOut")
    except OSError as error:
        print(type(error).__name__)
