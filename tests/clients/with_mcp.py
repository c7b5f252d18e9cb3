"""The official MCP client against ``vlfit mcp``: ``python with_mcp.py URL PICTURE PYTHON``.

Fails by an exception. ``PYTHON``: of an environment with vlfit. ``URL``: of the server that answers. The
client starts ``vlfit mcp`` itself, over stdio; then it is started over HTTP.
"""

import asyncio
import json
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters


async def talk(target: Any, name: str, picture: Path) -> None:
    def works(feature: str) -> None:
        print(f"mcp, {name}: works: {feature}")

    async with asyncio.timeout(60), Client(target) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert tools >= {"describe", "ask", "detect", "read_text", "compare", "search"}, tools
        works("list")
        told = await client.call_tool("describe", {"picture": str(picture)})
        assert not told.is_error, told
        assert text_of(told), told
        works("chat with a picture")
        told = await client.call_tool("ask", {"question": "What is this?", "pictures": [picture.name]})
        assert not told.is_error, told
        works("tool call")
        found = await client.call_tool("detect", {"picture": picture.name, "things": "elephants"})
        assert not found.is_error, found
        assert found.structured_content == json.loads(text_of(found)), found
        works("schema")
        refused = await client.call_tool("describe", {"picture": "/etc/passwd"})
        assert refused.is_error, refused
        assert refused.structured_content["error"]["code"] == "not_allowed", refused
        assert (await client.call_tool("describe", {"picture": "missing.png"})).is_error
        works("error")


def text_of(result: Any) -> str:
    return "".join(each.text for each in result.content)


def main(url: str, picture: Path, python: str) -> None:
    program = [python, "-m", "vlfit", "mcp", "--root", str(picture.parent), "--server", url]
    asyncio.run(talk(StdioServerParameters(command=program[0], args=program[1:]), "stdio", picture))

    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([*program, "--http", "--port", str(port)]) as server:
        try:
            wait_for(port, server)
            asyncio.run(talk(f"http://127.0.0.1:{port}/mcp", "HTTP", picture))
        finally:
            server.terminate()


def wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        assert server.poll() is None, server.returncode
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("vlfit mcp --http did not start")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    print("mcp: fine")
