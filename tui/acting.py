"""What the screen asks of the daemon: about pages, and to do things, each only after a yes."""

from __future__ import annotations

import asyncio
import contextlib

from textual import work
from textual.app import App
from textual.reactive import reactive

from tierd.daemon.errors import TierdError
from tierd.daemon.protocol import Submit
from tierd.tui import actions
from tierd.tui.feed import Feed, page_detail, page_with_key
from tierd.tui.format import size
from tierd.tui.glyphs import TIER_NAMES
from tierd.tui.messages import JumpToPage, PageWanted
from tierd.tui.snapshot import Phase, Snapshot
from tierd.tui.widgets.chat import Chat
from tierd.tui.widgets.dialogs import Ask, Confirm
from tierd.tui.widgets.prefixes import Prefixes
from tierd.tui.widgets.residency import Residency
from tierd.tui.widgets.sequences import Sequences

DETAIL_DELAY_S = 0.15  # the cursor has to rest for so long before the daemon is asked about a page


class ActingApp(App[None]):
    """The part of the screen that talks back. `snapshot`: what is shown at the moment."""

    # Panels repaint what changed of them: `repaint` would draw the whole screen anew for each frame.
    snapshot: reactive[Snapshot] = reactive(Snapshot(), init=False, always_update=True, repaint=False)

    def __init__(self, feed: Feed, *, native_colours: bool) -> None:
        """`native_colours`: it begins with the terminal's own, and under NO_COLOR with none: Textual asks that once,
        before it knows the theme, and would paint black behind everything otherwise."""
        super().__init__(ansi_color=native_colours or None)
        self.set_reactive(App.ansi_color, None)  # from now on the theme says it
        self.feed = feed

    def action_panel(self, name: str) -> None:
        """Bring a panel to the front and give it the keys."""
        raise NotImplementedError

    def focused_panel(self) -> str:
        """The panel that has the keys, empty when none has."""
        raise NotImplementedError

    # -- pages -----------------------------------------------------------------------------------------------------

    def on_jump_to_page(self, message: JumpToPage) -> None:
        """Show a page in the map."""
        if message.key and self.snapshot.standing.phase is Phase.LIVE and "page" in self.snapshot.ops:
            self._jump_to_key(message)
        else:
            self._jump(message.tier, message.slot)

    def _jump(self, tier: str, slot: int) -> None:
        if slot < 0:
            self.notify("this page is in no map any more", severity="warning")
            return
        self.action_panel("residency")
        self.query_one(Residency).jump(tier, slot)

    @work(exclusive=True, group="page")
    async def _jump_to_key(self, wanted: JumpToPage) -> None:
        """To where the page lies now, which may be elsewhere than when it was in the log."""
        engine = self.snapshot.engine
        tier, slot = wanted.tier, wanted.slot
        try:
            found = await page_with_key(self.feed, engine.model if engine else "", wanted.key)
        except TierdError:
            self.notify("this page is not known any more: shown is where it was")
        else:
            tier, slot = next(iter((found.places or {}).items()), (tier, slot))
        self._jump(tier, slot)

    def on_page_wanted(self, message: PageWanted) -> None:
        """Ask the daemon about the page once the cursor rests."""
        residency = self.query_one(Residency)
        if self.snapshot.standing.phase is not Phase.LIVE:
            residency.detail_note = "key and text: only a live daemon tells"
        elif "page" not in self.snapshot.ops:
            residency.detail_note = "key, text and checksum: not reported by this daemon"
        else:
            self._tell_page(message.tier, message.slot)
        residency.repaint()

    @work(exclusive=True, group="page")
    async def _tell_page(self, tier: str, slot: int) -> None:
        residency, engine = self.query_one(Residency), self.snapshot.engine
        await asyncio.sleep(DETAIL_DELAY_S)
        try:
            detail = await page_detail(self.feed, engine.model if engine else "", tier, slot)
        except TierdError as exc:
            residency.detail_note = exc.message
        else:
            if residency.cursor == (tier, slot):
                residency.detail = detail
        residency.repaint()

    # -- acting ----------------------------------------------------------------------------------------------------

    def action_on_prefix(self, action: str) -> None:
        """One of `actions.PREFIX_ACTIONS` on the prefix under the cursor."""
        row = self.query_one(Prefixes).selected
        if row is None or self.focused_panel() != "prefixes":
            self.notify("choose a prefix first (panel 5)", severity="warning")
            return
        self._ask(actions.on_prefix(action, row, self.snapshot))

    def action_cancel(self) -> None:
        """Cancel the request under the cursor."""
        row = self.query_one(Sequences).selected
        if row is None or self.focused_panel() != "sequences":
            self.notify("choose a request first (panel 4)", severity="warning")
            return
        self._ask(actions.cancel(row, self.snapshot))

    def action_unload(self) -> None:
        """Unload the model."""
        if self.snapshot.engine is not None:
            self._ask(actions.unload(self.snapshot))

    def action_verify(self) -> None:
        """Read every page on disk."""
        if self.snapshot.engine is not None:
            self._ask(actions.verify(self.snapshot))

    def action_resize(self, tier: str) -> None:
        """Another size for an arena."""
        engine = self.snapshot.engine
        if engine is None or tier not in engine.tiers:
            return
        now = size(engine.tiers[tier].total_pages * engine.tiers[tier].page_bytes)

        def answered(wanted: str | None) -> None:
            if wanted is not None:
                try:
                    self._ask(actions.resize(tier, wanted, self.snapshot))
                except TierdError as exc:
                    self.notify(exc.message, severity="error")

        self.push_screen(Ask(f"{TIER_NAMES[tier]} has {now}. How much shall it have?", "512MiB, 2GB"), answered)

    def _ask(self, request: actions.Request) -> None:
        if request.op not in self.snapshot.ops:
            self.notify(f"this daemon has no operation {request.op!r}", severity="warning")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._do(request)

        self.push_screen(Confirm(request.question), answered)

    @work(group="act")
    async def _do(self, request: actions.Request) -> None:
        try:
            answer = await self.feed.call(request.op, **request.args)
        except TierdError as exc:
            self.notify(exc.message, severity="error")
        else:
            findings = answer.get("findings")
            self.notify(request.done if not findings else f"{len(findings)} findings: {findings[0]}")

    # -- chat ------------------------------------------------------------------------------------------------------

    def on_chat_sent(self, message: Chat.Sent) -> None:
        """Send the conversation to the model."""
        self._talk(message)

    @work(exclusive=True, group="chat")
    async def _talk(self, sent: Chat.Sent) -> None:
        engine = self.snapshot.engine
        submit = Submit(model=engine.model if engine else "", messages=sent.messages)
        note = "stopped"
        try:
            async with contextlib.aclosing(self.feed.generate(submit)) as answer:
                async for event in answer:
                    sent.chat.take(event)
        except TierdError as exc:
            note = exc.message
        finally:
            if sent.chat.busy:
                sent.chat.end(note)
