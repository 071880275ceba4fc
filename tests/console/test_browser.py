"""The console in a real browser: Chromium, with and without scripts, at the widths of a phone up to a wide screen."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from axe_playwright_python.async_playwright import Axe  # type: ignore[import-untyped]
from playwright.async_api import Browser, Page, Route, async_playwright, expect

from aviso_workers import App
from aviso_workers.console.pages import PAGES
from aviso_workers.testing import Harness
from tests.console.conftest import OPERATOR, Served, publish, shown
from tests.waits import PATIENCE_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CHROMIUM = shutil.which("chromium")
PATIENCE_MS = 1000 * PATIENCE_SECONDS
STATED = {"{app}/{agent}": "field-index/blocks", "{app}": "field-index", "{sequence}": "1", "{number}": "1"}
RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
}
SIZES = [(390, "dark"), (390, "light"), (820, "dark"), (820, "light"), (1280, "dark"), (1280, "light"), (1920, "dark")]


def addresses() -> list[str]:
    """Every page, filled; and some that are refused or empty."""
    found = []
    for path in PAGES:
        for name, value in STATED.items():
            path = path.replace(name, value)
        found.append(path)
    return [*found, "/notification?name=mars@1", "/agents?q=nothing", "/dead-letters?agent=nobody", "/jobs/7"]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium: install the package chromium")
    async with async_playwright() as playwright:
        # Its sandbox cannot be used by root, and the pages are our own.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(browser: Browser, console: Served, **settings: Any) -> AsyncIterator[tuple[Page, list[str]]]:
    """A page of a user, and what the browser complains about."""
    user, password = OPERATOR
    context = await browser.new_context(
        base_url=console.url, http_credentials={"username": user, "password": password}, **settings
    )
    context.set_default_timeout(PATIENCE_MS)
    page, complaints = await context.new_page(), list[str]()
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page, complaints
    await context.close()


async def filled(console: Served, app: App) -> None:
    """Have something on every page."""
    await publish(app, 1, 3, 4)
    async with console.client() as client:
        await shown(client, "/", "1 agent needs you")
        await shown(client, "/dead-letters", "1 dead letter,")


@pytest.mark.parametrize(
    ("width", "scheme"),
    SIZES,
)
async def test_every_page_fits_and_has_nothing_that_hinders(
    browser: Browser, console: Served, app: App, running: Harness, width: int, scheme: Any
) -> None:
    await filled(console, app)
    hinders: list[str] = []
    async with opened(
        browser, console, viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
    ) as (page, _):

        async def look() -> None:
            found = await Axe().run(page, options=RULES)
            nodes = [f"{each['id']}: {each['nodes'][0]['html']}" for each in found.response["violations"]]
            hinders.extend(f"{page.url}: {each}" for each in nodes)
            if await page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                hinders.append(f"{page.url}: it is wider than the window")

        for address in addresses():
            await page.goto(address)
            await look()
        for button in ("Retry 1 …", "Erase 1 …"):
            await page.goto("/dead-letters")
            await page.get_by_role("link", name="Look").click()
            await look()  # at the page of a cause
            await page.get_by_role("button", name=button).click()
            await look()  # at the question
    assert hinders == []


async def test_a_page_shows_what_changes_and_the_browser_has_no_complaint(
    browser: Browser, console: Served, app: App, running: Harness
) -> None:
    async def late(route: Route) -> None:
        await anyio.sleep(1.0)
        await route.continue_()

    async with opened(browser, console) as (page, complaints):
        await page.route("**/hx-*.js", late)  # as where the network is slow: no script may begin without the others
        await page.goto("/agents")
        await page.get_by_text("Filter").click()
        await page.get_by_label("Text").fill("half a wo")
        await publish(app, 3)
        await expect(page.locator("#live")).to_contain_text("at MARS@1", timeout=PATIENCE_MS)
        assert await page.get_by_label("Text").input_value() == "half a wo", "what somebody types stays"
        for address in addresses():
            await page.goto(address)
    assert [each for each in complaints if "404" not in each] == []


async def test_what_somebody_has_opened_and_typed_survives_an_update(
    browser: Browser, console: Served, app: App, running: Harness
) -> None:
    async with opened(browser, console) as (page, _):
        await page.goto("/agents/field-index/blocks")
        await page.locator("summary", has_text="Pause").click()
        await page.get_by_label("For").fill("2h")
        await page.locator("summary", has_text="Policy").click()
        await publish(app, 3)
        await expect(page.locator("#live")).to_contain_text("at MARS@1", timeout=PATIENCE_MS)
        assert await page.get_by_label("For").input_value() == "2h"
        await expect(page.get_by_text("order by")).to_be_visible()


async def test_a_page_whose_updates_are_paused_stays_as_it_is(
    browser: Browser, console: Served, app: App, running: Harness
) -> None:
    asked: list[str] = []
    async with opened(browser, console) as (page, _):
        await page.goto("/agents?order=lag")
        await page.get_by_role("link", name="Pause updates").click()
        await expect(page.get_by_text("Updates are paused")).to_be_visible()
        await page.wait_for_load_state("networkidle")
        page.on("request", lambda request: asked.append(request.url))
        await publish(app, 3)
        async with console.client() as client:
            await shown(client, "/agents", "at MARS@1")
        assert "at MARS@1" not in await page.content()
        assert [each for each in asked if not each.endswith("/icon.svg")] == []
        await page.get_by_role("link", name="Update again").click()
        await expect(page.locator("#live")).to_contain_text("at MARS@1", timeout=PATIENCE_MS)
        assert page.url.endswith("/agents?order=lag"), "order and filter stay in the address"


async def test_it_is_of_use_without_scripts_and_with_a_keyboard(
    browser: Browser, console: Served, app: App, running: Harness
) -> None:
    await filled(console, app)
    async with opened(browser, console, java_script_enabled=False) as (page, _):
        await page.goto("/dead-letters")
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        await page.get_by_role("button", name="Retry all …").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("1 dead letter of field-index/fails is handed back")).to_be_visible()
        await page.get_by_role("button", name="Retry 1").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="Retry of 1")).to_be_visible()
        async with console.client() as client:
            await shown(client, "/jobs/1", "1 of 1 handed back.")


async def test_html_of_a_notification_is_text(browser: Browser, console: Served, app: App, running: Harness) -> None:
    await publish(app, 3, payload={"path": "<img src=x onerror=alert(1)><script>alert(2)</script>"})
    async with console.client() as client:
        await shown(client, "/dead-letters", "1 dead letter,")
    async with opened(browser, console) as (page, complaints):
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        of_letters = ("/dead-letters", "/dead-letters/field-index/1")
        for address in (*of_letters, "/notification?name=mars@1", "/agents/field-index/fails"):
            await page.goto(address)
            assert await page.locator("main b, main img, main script").count() == 0
    assert complaints == []
