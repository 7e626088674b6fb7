"""Faults to plant in the source of saved KV blocks, of the adapter cache, and of rare branches."""

from __future__ import annotations

from .mutations import Mutation

MUTATIONS_OF_STORAGE = (
    Mutation(
        "the digest of a file is not checked",
        "block_store.files",
        "if not is_whole or check.tobytes() != _check(key, content):",
        "if not is_whole:",
    ),
    Mutation(
        "a block that could not be read counts as loaded",
        "block_store.store",
        "            if tier is None:\n                break",
        "            if tier is None:\n                tiers.append(self._host)\n                break",
    ),
    Mutation(
        "the end of a load does not wake the loop",
        "block_store.store",
        "            self._has_news = True\n        self._notify()",
        "            self._has_news = True",
    ),
    Mutation(
        "the files stay locked",
        "block_store.store",
        "            self._files.close()",
        "            pass",
    ),
    Mutation(
        "the thread that loads does not end", "block_store.store", "        self._loads.put(None)\n", ""
    ),
    Mutation(
        "the thread that saves goes on after the end",
        "block_store.store",
        "        self._is_over = True\n",
        "",
        is_rare=True,
    ),
    Mutation(
        "an adapter that was read does not wake the loop",
        "adapters.cache",
        "            is_done = self._finish_attempt(key, load, request_id, found)\n        self._notify()",
        "            is_done = self._finish_attempt(key, load, request_id, found)",
    ),
    Mutation(
        "a request that has ended keeps its adapter",
        "adapters.cache",
        "                entry.users -= 1\n",
        "",
    ),
    Mutation(
        "only the first of the waiting requests gets an adapter",
        "adapters.cache",
        "                for each in load.waiting:\n                    del self._waiting[each]\n",
        "                for each in list(load.waiting)[:1]:\n                    del self._waiting[each]\n",
    ),
    Mutation(
        "an unloaded adapter can still be found",
        "adapters.cache",
        "            del self._entries[entry.key]\n            entry.is_unloaded = True",
        "            entry.is_unloaded = True",
    ),
    Mutation(
        "the memory of a dropped adapter stays counted",
        "adapters.cache",
        "        self._num_bytes -= entry.num_bytes\n        if entry.is_announced",
        "        if entry.is_announced",
    ),
    Mutation(
        "the adapters' thread does not end",
        "adapters.cache",
        "        self._jobs.put(None)\n        self._thread",
        "        self._thread",
    ),
    Mutation(
        "the adapters of ended requests are not forgotten",
        "batch_manager.inputs",
        "            self._adapters.forget(request_id)\n",
        "",
    ),
    Mutation(
        "the adapters of the last requests are not forgotten",
        "batch_manager.gpt_manager",
        "or has_more or has_ended",
        "or has_more",
    ),
    Mutation(
        "only the first of several large parts of a message is sent",
        "endpoint.server",
        "for piece in run if is_large else",
        "for piece in list(run)[:1] if is_large else",
    ),
    Mutation(
        "a request that an iteration has no room for is forgotten",
        "endpoint.local",
        "    return [waiting.pop(request_id) for request_id in taken]",
        "    found = [waiting.pop(request_id) for request_id in taken]\n    waiting.clear()\n    return found",
    ),
    Mutation(
        "a refused copy of a block ends the loop",
        "block_store.store",
        "            except Exception:  # no memory, or",
        "            except ArithmeticError:  # no memory, or",
    ),
    Mutation(
        "the thread that saves ends when memory is refused",
        "block_store.store",
        "except (OSError, MemoryError) as error:",
        "except OSError as error:",
    ),
    Mutation(
        "a refused message ends a thread",
        "endpoint.frames",
        "    except MemoryError:\n        raise BadFrame(f",
        "    except ArithmeticError:\n        raise BadFrame(f",
    ),
)
"""The mistakes, each of which some seeds must reveal."""
