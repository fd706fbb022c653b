"""Connects from the network namespace that it is started in; one order a line, one JSON answer a line.

    latency ADDRESS PORT COUNT      microseconds of each connect()
    rate ADDRESS PORT SECONDS       connections made and cut a second, one after the other
"""
import json
import socket
import struct
import sys
import time

CUT = struct.pack("ii", 1, 0)


def connect(address, port):
    """The time of connect() alone; the connection ends by a reset, so that no port is used up."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, CUT)
        connection.settimeout(5)
        began = time.perf_counter_ns()
        connection.connect((address, port))
        return (time.perf_counter_ns() - began) / 1000


for line in sys.stdin:
    verb, address, port, number = line.split()
    if verb == "latency":
        answer = [connect(address, int(port)) for _ in range(int(number))]
    else:
        end, made = time.perf_counter() + float(number), 0
        while time.perf_counter() < end:
            connect(address, int(port))
            made += 1
        answer = [made / float(number)]
    print(json.dumps(answer), flush=True)
