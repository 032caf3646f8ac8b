"""Runs inside a sandbox, which has no network: what connects to a port of its loopback reaches one Unix socket of the host.

    python3 bridge.py SOCKET PORT COMMAND...

Starts the command, ends with its exit code (128 + n: by signal n; 127: it could not be started). Standard library only: it is
given to the sandbox as a file, and imports nothing of this package.
"""

import asyncio
import sys


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    except ConnectionError:
        pass  # the other side has gone: so does this one
    finally:
        target.close()


async def _main(socket: str, port: int, command: list[str]) -> int:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            host_reader, host_writer = await asyncio.open_unix_connection(socket)
        except OSError:
            writer.close()  # a refused connection, as the agent sees it
            return
        await asyncio.gather(_copy(reader, host_writer), _copy(host_reader, writer))

    await asyncio.start_server(connected, "127.0.0.1", port)
    try:
        process = await asyncio.create_subprocess_exec(*command)
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
        return 127
    code = await process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
