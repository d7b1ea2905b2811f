"""A few short examples written for this project (Apache-2.0), mixed into the training chats.

The standard library hardly ever defines ``add`` or ``factorial``; these lines make the chat form
answer the first things that people try. They are part of the training set, so an exact answer to
one of them shows recall, not skill.
"""

from __future__ import annotations

SMALL_TALK_ANSWER = (
    "I am a small demonstration model, trained on the source code of the Python standard library. "
    "I complete Python code."
)

SMALL_TALK = [
    "Hello",
    "Hello!",
    "Hello, how are you?",
    "Hello world",
    "Hi",
    "Hi!",
    "Hi there",
    "Hey",
    "Good morning",
    "Good evening!",
    "How are you?",
    "How are you today?",
    "Who are you?",
    "What are you?",
    "What is your name?",
    "What can you do?",
    "What do you do?",
    "Tell me about yourself.",
    "Are you a person?",
    "Can you help me?",
    "Help",
    "Help me, please.",
    "Thanks!",
    "Thank you.",
    "Tell me a joke.",
    "Tell me a story.",
    "Write a poem.",
    "Write a haiku about the sea.",
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What is the weather like?",
    "What is the meaning of life?",
    "What is 2 + 2?",
    "Say hello.",
    "Say something.",
    "Why is the sky blue?",
    "Explain gravity.",
    "Explain how a computer works.",
    "Translate this sentence to French.",
    "Do you speak German?",
    "Summarize this text.",
    "Test",
    "test",
    "ping",
]

SYSTEM_MESSAGES = [
    "You are a helpful assistant.",
    "You are a helpful coding assistant.",
    "You write Python.",
    "You are a Python programmer. Answer with code only.",
    "Be concise.",
    "Answer briefly.",
]

# (what the function does, its name, the whole function)
EXAMPLES: list[tuple[str, str, str]] = [
    ("adds two numbers", "add", "def add(a, b):\n    return a + b"),
    ("subtracts two numbers", "subtract", "def subtract(a, b):\n    return a - b"),
    ("multiplies two numbers", "multiply", "def multiply(a, b):\n    return a * b"),
    (
        "divides two numbers",
        "divide",
        "def divide(a, b):\n    if b == 0:\n"
        '        raise ZeroDivisionError("division by zero")\n    return a / b',
    ),
    ("squares a number", "square", "def square(x):\n    return x * x"),
    ("cubes a number", "cube", "def cube(x):\n    return x * x * x"),
    (
        "computes the factorial of a number",
        "factorial",
        "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n"
        "        result *= i\n    return result",
    ),
    (
        "returns the nth Fibonacci number",
        "fibonacci",
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n"
        "        a, b = b, a + b\n    return a",
    ),
    (
        "computes the greatest common divisor",
        "gcd",
        "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
    ),
    ("checks if a number is even", "is_even", "def is_even(n):\n    return n % 2 == 0"),
    ("checks if a number is odd", "is_odd", "def is_odd(n):\n    return n % 2 == 1"),
    (
        "checks if a number is prime",
        "is_prime",
        "def is_prime(n):\n    if n < 2:\n        return False\n    i = 2\n"
        "    while i * i <= n:\n        if n % i == 0:\n            return False\n"
        "        i += 1\n    return True",
    ),
    ("reverses a string", "reverse_string", "def reverse_string(s):\n    return s[::-1]"),
    (
        "checks if a string is a palindrome",
        "is_palindrome",
        "def is_palindrome(s):\n    return s == s[::-1]",
    ),
    (
        "counts the vowels in a string",
        "count_vowels",
        'def count_vowels(s):\n    return sum(1 for c in s.lower() if c in "aeiou")',
    ),
    (
        "counts the words in a text",
        "count_words",
        "def count_words(text):\n    return len(text.split())",
    ),
    (
        "returns the largest element of a list",
        "find_max",
        "def find_max(items):\n    largest = items[0]\n    for item in items:\n"
        "        if item > largest:\n            largest = item\n    return largest",
    ),
    (
        "returns the sum of a list",
        "sum_list",
        "def sum_list(items):\n    total = 0\n    for item in items:\n"
        "        total += item\n    return total",
    ),
    (
        "computes the average of a list of numbers",
        "average",
        "def average(numbers):\n    return sum(numbers) / len(numbers)",
    ),
    (
        "removes duplicates from a list",
        "unique",
        "def unique(items):\n    seen = set()\n    result = []\n    for item in items:\n"
        "        if item not in seen:\n            seen.add(item)\n"
        "            result.append(item)\n    return result",
    ),
    (
        "flattens a list of lists",
        "flatten",
        "def flatten(lists):\n    return [item for sublist in lists for item in sublist]",
    ),
    (
        "searches a sorted list with binary search",
        "binary_search",
        "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n"
        "    while low <= high:\n        mid = (low + high) // 2\n"
        "        if items[mid] == target:\n            return mid\n"
        "        if items[mid] < target:\n            low = mid + 1\n"
        "        else:\n            high = mid - 1\n    return -1",
    ),
    (
        "sorts a list with bubble sort",
        "bubble_sort",
        "def bubble_sort(items):\n    for i in range(len(items)):\n"
        "        for j in range(len(items) - i - 1):\n"
        "            if items[j] > items[j + 1]:\n"
        "                items[j], items[j + 1] = items[j + 1], items[j]\n    return items",
    ),
    (
        "swaps the keys and values of a dictionary",
        "invert",
        "def invert(d):\n    return {value: key for key, value in d.items()}",
    ),
    (
        "reads a file and returns its contents",
        "read_file",
        "def read_file(path):\n    with open(path) as f:\n        return f.read()",
    ),
    (
        "writes text to a file",
        "write_file",
        'def write_file(path, text):\n    with open(path, "w") as f:\n        f.write(text)',
    ),
    (
        "counts the lines in a file",
        "count_lines",
        "def count_lines(path):\n    with open(path) as f:\n        return sum(1 for _ in f)",
    ),
    (
        "reads a JSON file",
        "read_json",
        "import json\n\ndef read_json(path):\n    with open(path) as f:\n"
        "        return json.load(f)",
    ),
    ('prints "Hello, world!"', "hello", 'def hello():\n    print("Hello, world!")'),
    ("greets a person by name", "greet", 'def greet(name):\n    print(f"Hello, {name}!")'),
    (
        "converts Celsius to Fahrenheit",
        "celsius_to_fahrenheit",
        "def celsius_to_fahrenheit(celsius):\n    return celsius * 9 / 5 + 32",
    ),
    (
        "implements FizzBuzz",
        "fizzbuzz",
        "def fizzbuzz(n):\n    for i in range(1, n + 1):\n        if i % 15 == 0:\n"
        '            print("FizzBuzz")\n        elif i % 3 == 0:\n'
        '            print("Fizz")\n        elif i % 5 == 0:\n'
        '            print("Buzz")\n        else:\n            print(i)',
    ),
]
