"""Instructor: a pydantic model out of a conversation."""

import sys

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Pet(BaseModel):
    """An answer's fields, and no others: a random model would go on inventing some."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=4)
    legs: int = Field(ge=0, le=9)


client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
client = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
pet = client.chat.completions.create(
    model="tiny",
    messages=[{"role": "user", "content": "a cat"}],
    response_model=Pet,
    max_tokens=150,
    seed=1,
    max_retries=0,
)
assert isinstance(pet, Pet), pet
