"""A model that knows tools, for tests of requests."""

from actors.openai.chat_dialect import ChatDialect, ToolFormat

DIALECT = ChatDialect(knows_tools=True, tool_format=ToolFormat.HERMES)
