"""A client of the `openai` package that talks to an application in this process."""

import httpx2
import openai

from tests.actors.ingress.edge_app import EdgeApp


def client_of(app: EdgeApp, api_key: str = "none") -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(app=app.app, raise_app_exceptions=False)
    return openai.AsyncOpenAI(
        api_key=api_key,
        base_url="http://127.0.0.1:8000/v1",
        http_client=httpx2.AsyncClient(transport=transport),
        max_retries=0,
    )
