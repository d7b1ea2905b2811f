"""Load over HTTP for any server of OpenAI's protocol: scenarios, schedules, a client, a report."""
