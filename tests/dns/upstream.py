#!/usr/bin/env python3
"""A name server of the outside, for tests: what it answers is in the name that is asked. Every
question is a line in LOG: protocol, name, type.

    upstream.py ADDRESS LOG

    nx.*         no such name, SOA of 60 s        fail.*   SERVFAIL
    big.*        300 addresses (TC over UDP)      silent.* no answer
    plain.*      FORMERR where there is EDNS      forged.* three wrong replies, then the right one
    ttlN.*       an address for N seconds         else     an address for 300 s, the last byte of which
                                                           counts the questions
"""
import socket
import struct
import sys
import threading
import time

address, log = sys.argv[1], open(sys.argv[2], "a", buffering=1)
family = socket.AF_INET6 if ":" in address else socket.AF_INET
asked = 0


def name_at(message, at):
    labels = []
    while message[at]:
        labels.append(message[at + 1:at + 1 + message[at]])
        at += 1 + message[at]
    return labels, at + 1


def reply(message, tcp):
    """Zero or more messages."""
    global asked
    labels, end = name_at(message, 12)
    kind, = struct.unpack("!H", message[end:end + 2])
    question, edns = message[12:end + 4], message[11] > 0
    name = b".".join(labels).decode(errors="replace")
    log.write(f"{'tcp' if tcp else 'udp'} {name} {kind}\n")
    asked += 1
    first = name.lower().split(".")[0]

    def build(code=0, answers=(), authority=b"", flags=0x8180, ident=message[:2], question=question):
        return (ident + struct.pack("!HHHHH", flags | code, 1, len(answers), 1 if authority else 0, 0)
                + question + b"".join(answers) + authority)

    def record(n, ttl):
        if kind == 28:
            return struct.pack("!HHHIH", 0xC00C, 28, 1, ttl, 16) + bytes(15) + bytes([n % 256])
        return struct.pack("!HHHIH", 0xC00C, kind, 1, ttl, 4) + bytes([203, 0, n // 256, n % 256])

    soa = b"\0" + struct.pack("!HHIH", 6, 1, 60, 22) + b"\0\0" + struct.pack("!IIIII", 1, 2, 3, 4, 60)
    if first == "nx":
        return [build(3, authority=soa)]
    if first == "fail":
        return [build(2)]
    if first == "silent":
        return []
    if first == "plain" and edns:
        return [build(1)]
    if first == "big":
        return [build(0, [record(n, 300) for n in range(300)]) if tcp else build(0, [record(1, 300)], flags=0x8380)]
    if first == "forged":
        other = bytes([message[0] ^ 1]) + message[1:2]
        evil = b"\x04evil\x04test\0" + question[-4:]
        return [build(0, [record(66, 300)], ident=other), build(0, [record(66, 300)], question=evil), b"\0" * 7,
                build(0, [record(1, 300)])]
    ttl = int(first[3:]) if first.startswith("ttl") and first[3:].isdigit() else 300
    return [build(0, [record(asked, ttl)])]


def serve_udp():
    while True:
        message, peer = udp.recvfrom(4096)
        for answer in reply(message, False):
            udp.sendto(answer, peer)


def serve_tcp():
    while True:
        stream, _ = tcp.accept()
        length, = struct.unpack("!H", stream.recv(2, socket.MSG_WAITALL))
        for answer in reply(stream.recv(length, socket.MSG_WAITALL), True):
            stream.sendall(struct.pack("!H", len(answer)) + answer)
        stream.close()


udp = socket.socket(family, socket.SOCK_DGRAM)
udp.bind((address, 53))
tcp = socket.socket(family, socket.SOCK_STREAM)
tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
tcp.bind((address, 53))
tcp.listen(64)
print("ready", flush=True)
for serve in (serve_udp, serve_tcp):
    threading.Thread(target=serve, daemon=True).start()
while True:
    time.sleep(1000)
