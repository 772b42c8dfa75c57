//! Who owns which page: one pool per KV group, and the prefix tree that lets sequences share full pages.

use std::collections::BTreeMap;

use fornax_compute::{KvGroup, KvKind, PAGE_TOKENS, PageId, RowState};

use crate::event::Miss;
use crate::picture::{PAGES_MAX, PageUse};
use crate::prefix::{NodeId, PrefixTree, Units};
use crate::tier::{Missing, PageName, Unkept, names};

/// A sequence's pages: one table per KV group, and how far its tokens are in the prefix tree.
///
/// A table belongs to exactly one sequence and must be given back through [`Pages::release`].
#[derive(Debug)]
pub(crate) struct Tables {
    /// By group that has pages; entry `p` holds positions `p * PAGE_TOKENS ..`. Entries below a window are the trash
    /// page.
    groups: Vec<Vec<PageId>>,
    /// By group of states.
    states: Vec<States>,
    /// Whether `groups` are with a batch.
    lent: bool,
    /// Positions up to which checkpoints were thought of.
    planned: usize,
    /// Positions after which the states are kept in any case: the last full page of what was known when the sequence
    /// was seated, which is the longest prefix that a request of the same prompt can use.
    mark: usize,
    /// The node of the last page entered in the tree, held by a reference.
    node: NodeId,
    /// Leading pages already entered in the tree.
    entered: usize,
}

/// What a sequence has of one group of states.
#[derive(Debug, Default)]
struct States {
    /// The checkpoint that it goes on from, held until a step that read it is collected.
    found: Option<PageId>,
    /// Whether a step in flight reads it.
    read: bool,
    /// The sequence's own state, which its steps go on from.
    own: Option<PageId>,
    /// Checkpoints that are not in the tree yet: after this many positions, in this page. Ascending.
    saves: Vec<(usize, PageId)>,
    /// The newest checkpoint within the answer. The next one takes its place: the next turn of a conversation goes on from
    /// the end of the answer.
    newest: Option<(NodeId, PageId)>,
}

impl Tables {
    /// The page tables as a batch row carries them, until [`Tables::take_back`].
    pub(crate) fn lend(&mut self) -> Vec<Vec<PageId>> {
        assert!(!self.lent, "lent once");
        self.lent = true;
        std::mem::take(&mut self.groups)
    }

    /// What was lent.
    pub(crate) fn take_back(&mut self, groups: Vec<Vec<PageId>>) {
        assert!(self.lent, "nothing was lent");
        self.lent = false;
        self.groups = groups;
    }

    /// What a row of positions `start..end` does with the sequence's states. They are covered ([`Pages::grow`]).
    pub(crate) fn states(&mut self, start: usize, end: usize) -> Vec<RowState> {
        let of = |states: &mut States| {
            let own = states.own.expect("covered");
            let from = match states.found.filter(|_| !states.read) {
                None if start == 0 => None,
                None => Some(own),
                found => found,
            };
            states.read = true;
            let within = states.saves.iter().filter(|&&(after, _)| start < after && after <= end);
            let saves =
                within.map(|&(after, page)| (u32::try_from(after).expect("bounded by the context"), page));
            RowState { from, to: own, saves: saves.collect() }
        };
        self.states.iter_mut().map(of).collect()
    }
}

/// Counts for the stats snapshot and for the tests that nothing is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Pages that exist, the trash page excluded.
    pub total: usize,
    /// Pages that some sequence refers to.
    pub referenced: usize,
    /// Unreferenced pages kept for prefix hits; free to be evicted.
    pub cached: usize,
}

/// All pages of an engine.
pub(crate) struct Pages {
    /// By group: those that have pages, then those of states.
    pools: Vec<PagePool>,
    /// How many of them have a page for every 32 tokens.
    paged: usize,
    /// Of the others: positions from one checkpoint to the next.
    every: Vec<usize>,
    tree: PrefixTree,
    /// Whether copies are kept elsewhere.
    kept: bool,
    /// Pages that were taken from the tree and of which there is no copy: their content is there until the next step.
    evicted: Vec<Unkept>,
}

impl Pages {
    pub(crate) fn new(groups: &[KvGroup]) -> Self {
        assert!(!groups.is_empty(), "a model has at least one KV group");
        let every = |group: &KvGroup| match group.kind {
            KvKind::State { every, .. } => Some(every),
            KvKind::Pairs { .. } | KvKind::Latent { .. } => None,
        };
        let paged = groups.iter().take_while(|group| every(group).is_none()).count();
        let every: Vec<usize> = groups.iter().filter_map(every).collect();
        assert_eq!(paged + every.len(), groups.len(), "groups of states come last");
        let whole = |&every: &usize| every > 0 && every.is_multiple_of(PAGE_TOKENS);
        assert!(every.iter().all(whole), "checkpoints are at the ends of pages");
        // Somebody's checkpoint to go on from, and the sequence's own state: whoever is first in line moves on.
        let room = |group: &KvGroup| group.pages >= 3;
        assert!(groups[paged..].iter().all(room), "a pool of states has the trash and at least two more");
        Pages {
            paged,
            every,
            pools: groups.iter().map(|group| PagePool::new(group.pages, group.window)).collect(),
            tree: PrefixTree::new(groups.len()),
            kept: false,
            evicted: Vec::new(),
        }
    }

    /// Copies of pages are kept elsewhere from now on.
    pub(crate) fn keep_copies(&mut self) {
        self.kept = true;
        self.tree.name_paths();
    }

    /// Pages that were evicted since the last call without a copy; nothing has been written over them yet.
    pub(crate) fn take_evicted(&mut self) -> Vec<Unkept> {
        std::mem::take(&mut self.evicted)
    }

    /// Whether there may be pages of the tree of which there is no copy.
    pub(crate) fn has_unkept(&self) -> bool {
        self.pools.iter().any(|pool| !pool.unkept.is_empty())
    }

    /// At most so many pages of the tree of which there is no copy; they count as copied from now on.
    pub(crate) fn take_unkept(&mut self, most: usize) -> Vec<Unkept> {
        let mut unkept = Vec::new();
        for (group, pool) in self.pools.iter_mut().enumerate() {
            while unkept.len() < most
                && let Some(page) = pool.unkept.pop()
            {
                // It may have been evicted, or entered anew, since.
                let state = &mut pool.pages[page.0 as usize];
                let Some(node) = state.node.filter(|_| !state.kept) else { continue };
                state.kept = true;
                if let Some(path) = self.tree.name(node) {
                    unkept.push(Unkept { name: PageName { path, group: small(group) }, group, page });
                }
            }
        }
        unkept
    }

    /// What a sequence could go on from if pages that are kept elsewhere were here.
    pub(crate) fn missing(
        &mut self,
        salt: &str,
        units: Units<'_>,
        holds: &dyn Fn(&PageName) -> bool,
    ) -> Option<Missing> {
        let pages_max = units.len().saturating_sub(1) / PAGE_TOKENS;
        let mut nodes = Vec::with_capacity(pages_max);
        let root = self.tree.root(None, salt);
        self.tree.hold(root);
        let mut node = root;
        for page in 0..pages_max {
            let Some(child) = self.tree.child(node, &units.page(page)) else { break };
            nodes.push(child);
            node = child;
        }
        let before = self.valid_in_every_group(&nodes);
        let paths = names(salt, (0..pages_max).map(|page| units.page(page)));
        let name = |group: usize, page: usize| PageName { path: paths[page], group: small(group) };
        let here = |group: usize, page: usize| {
            nodes.get(page).is_some_and(|&node| self.tree.page(node, group).is_some())
        };
        let there = |group: usize, page: usize| here(group, page) || holds(&name(group, page));
        let first = |group: usize, pages: usize| match group < self.paged {
            true => (self.pools[group].first_seen(pages * PAGE_TOKENS) / PAGE_TOKENS).min(pages),
            false => pages - 1,
        };
        // Groups without a window need every page, which bounds what the others are looked up for.
        let whole = (0..self.paged).filter(|&group| self.pools[group].window.is_none());
        let bound = whole.map(|group| (0..pages_max).take_while(|&page| there(group, page)).count()).min();
        let groups = 0..self.pools.len();
        let others =
            groups.clone().filter(|&group| group >= self.paged || self.pools[group].window.is_some());
        let all = |pages: usize| {
            others.clone().all(|group| (first(group, pages)..pages).all(|page| there(group, page)))
        };
        let after = (before + 1..=bound.unwrap_or(pages_max)).rev().find(|&pages| all(pages));
        let missing = after.map(|after| {
            let of = |group: usize| (first(group, after)..after).map(move |page| (group, page));
            let pages = groups.clone().flat_map(of).filter(|&(group, page)| !here(group, page));
            Missing {
                before: before * PAGE_TOKENS,
                after: after * PAGE_TOKENS,
                pages: pages.map(|(group, page)| (page, name(group, page))).collect(),
            }
        });
        self.tree.let_go(root);
        missing
    }

    /// Gives pages back their places in the tree, as far as there is room. `fill` writes a page's content: before
    /// that it is handed what was evicted for it.
    pub(crate) fn restore(
        &mut self,
        salt: &str,
        units: Units<'_>,
        pages: &[(usize, PageName)],
        fill: &mut dyn FnMut(usize, Vec<Unkept>, PageId) -> bool,
    ) {
        let Some(last) = pages.iter().map(|(at, _)| *at).max() else { return };
        let mut node = self.tree.root(None, salt);
        self.tree.hold(node);
        let mut nodes = Vec::with_capacity(last + 1);
        for at in 0..=last {
            let child = self.tree.enter(node, &units.page(at));
            self.tree.hold(child);
            self.tree.let_go(node);
            node = child;
            nodes.push(child);
        }
        for (index, &(at, name)) in pages.iter().enumerate() {
            let (group, node) = (name.group as usize, nodes[at]);
            if self.tree.page(node, group).is_some() {
                continue;
            }
            let Some(page) = self.take(group) else { break };
            if fill(index, self.take_evicted(), page) {
                self.tree.attach(node, group, page);
                self.pools[group].name(page, node);
                self.pools[group].pages[page.0 as usize].kept = true;
            }
            self.pools[group].let_go(page);
        }
        self.tree.let_go(node);
    }

    /// Tables for a new or resumed sequence, holding the longest run of leading pages that every group still has; with
    /// it, how many tokens that is, and why it is no more. At least one token is left to compute, since its logits are
    /// wanted.
    pub(crate) fn find(
        &mut self,
        adapter: Option<u32>,
        salt: &str,
        units: Units<'_>,
    ) -> (Tables, usize, Option<Miss>) {
        let pages_max = units.len().saturating_sub(1) / PAGE_TOKENS;
        let root = self.tree.root(adapter, salt);
        let mut path = Vec::new();
        let mut node = root;
        for page in 0..pages_max {
            let Some(child) = self.tree.child(node, &units.page(page)) else { break };
            path.push(child);
            node = child;
        }
        let hit = self.valid_in_every_group(&path);
        let miss = self.miss(node, path.len(), hit, pages_max, units);
        let mut groups = Vec::with_capacity(self.paged);
        for (index, pool) in self.pools[..self.paged].iter_mut().enumerate() {
            let first = pool.first_seen(hit * PAGE_TOKENS) / PAGE_TOKENS;
            let mut table = vec![PageId::TRASH; first.min(hit)];
            for &node in &path[first.min(hit)..hit] {
                let page = self.tree.page(node, index).expect("checked above");
                pool.hold(page);
                table.push(page);
            }
            groups.push(table);
        }
        let node = if hit == 0 { root } else { path[hit - 1] };
        self.tree.hold(node);
        let found = |(index, pool): (usize, &mut PagePool)| {
            let found = self.tree.page(node, self.paged + index).filter(|_| hit > 0);
            found.inspect(|&page| pool.hold(page));
            States { found, ..States::default() }
        };
        let states = self.pools[self.paged..].iter_mut().enumerate().map(found).collect();
        let (planned, mark) = (hit * PAGE_TOKENS, pages_max * PAGE_TOKENS);
        (Tables { groups, states, lent: false, planned, mark, node, entered: hit }, planned, miss)
    }

    /// Why no more than `hit` pages were found. `node` is the last of the `known` pages that the tree has.
    fn miss(
        &self,
        node: NodeId,
        known: usize,
        hit: usize,
        pages_max: usize,
        units: Units<'_>,
    ) -> Option<Miss> {
        if hit == pages_max {
            return None;
        }
        let forgotten = self.tree.forgotten(node, (known..pages_max).map(|page| units.page(page)));
        if forgotten > 0 || known > hit {
            return Some(Miss::Evicted { known: (known + forgotten) * PAGE_TOKENS });
        }
        let likest = self.tree.likest(node, &units.page(known));
        Some(likest.map_or(Miss::New, |same| Miss::Differs { at: known * PAGE_TOKENS + same }))
    }

    /// Leading pages of `path` from which a sequence can go on in every group: a full group needs them all, a
    /// windowed group those that the next position still sees, a group of states the checkpoint exactly there.
    fn valid_in_every_group(&self, path: &[NodeId]) -> usize {
        (1..=path.len())
            .rev()
            .find(|&pages| {
                self.pools.iter().enumerate().all(|(group, pool)| {
                    let first = match group < self.paged {
                        true => pool.first_seen(pages * PAGE_TOKENS) / PAGE_TOKENS,
                        false => pages - 1,
                    };
                    path[first.min(pages)..pages].iter().all(|&node| self.tree.page(node, group).is_some())
                })
            })
            .unwrap_or(0)
    }

    /// Makes the tables cover `positions`. All groups or none: `false` leaves everything as it was. Checkpoints are
    /// taken where there is room for them.
    pub(crate) fn grow(&mut self, tables: &mut Tables, positions: usize) -> bool {
        let pages = positions.div_ceil(PAGE_TOKENS);
        let fits = self
            .pools
            .iter()
            .zip(&tables.groups)
            .all(|(pool, table)| pages.saturating_sub(table.len()) <= pool.available());
        let mut states = self.pools[self.paged..].iter().zip(&tables.states);
        if !fits || !states.all(|(pool, states)| states.own.is_some() || pool.available() > 0) {
            return false;
        }
        for (group, table) in tables.groups.iter_mut().enumerate() {
            while table.len() < pages {
                table.push(self.take(group).expect("counted above"));
            }
        }
        let planned = tables.planned;
        tables.planned = planned.max(positions);
        for (index, states) in tables.states.iter_mut().enumerate() {
            let group = self.paged + index;
            if states.own.is_none() {
                states.own = Some(self.take(group).expect("counted above"));
            }
            for page in planned / PAGE_TOKENS..positions / PAGE_TOKENS {
                let after = (page + 1) * PAGE_TOKENS;
                // Nobody knows where an answer will end.
                let kept = after.is_multiple_of(self.every[index]) || after >= tables.mark;
                if let Some(page) = kept.then(|| self.take(group)).flatten() {
                    states.saves.push((after, page));
                }
            }
        }
        true
    }

    /// A page of a group for one owner, if there is one left.
    fn take(&mut self, group: usize) -> Option<PageId> {
        let (page, evicted) = self.pools[group].take()?;
        if let Some(node) = evicted {
            let unkept = self.kept && !self.pools[group].pages[page.0 as usize].kept;
            if let Some(path) = self.tree.name(node).filter(|_| unkept) {
                self.evicted.push(Unkept { name: PageName { path, group: small(group) }, group, page });
            }
            self.tree.detach(node, group);
        }
        Some(page)
    }

    /// Called when the keys and values of `units` have been computed and collected: enters the full pages in the
    /// prefix tree, and gives back pages that no later position of a windowed group can see.
    pub(crate) fn commit(&mut self, tables: &mut Tables, units: Units<'_>) {
        for index in tables.entered..units.pages() {
            let child = self.tree.enter(tables.node, &units.page(index));
            self.tree.hold(child);
            self.tree.let_go(tables.node);
            tables.node = child;
            tables.entered = index + 1;
            for (group, (pool, table)) in self.pools.iter_mut().zip(&tables.groups).enumerate() {
                let page = table[index];
                if page != PageId::TRASH && self.tree.page(child, group).is_none() {
                    self.tree.attach(child, group, page);
                    pool.name(page, child);
                    pool.note(page, self.kept);
                }
            }
            self.commit_states(tables, child, (index + 1) * PAGE_TOKENS);
        }
        for (pool, states) in self.pools[self.paged..].iter_mut().zip(&mut tables.states) {
            // The first step that read it is collected; later ones go on from the sequence's own.
            if states.read
                && let Some(page) = states.found.take()
            {
                pool.let_go(page);
            }
        }
        for (pool, table) in self.pools.iter_mut().zip(&mut tables.groups) {
            let first = pool.first_seen(units.len()) / PAGE_TOKENS;
            for entry in table.iter_mut().take(first).rev() {
                if *entry == PageId::TRASH {
                    break;
                }
                pool.let_go(*entry);
                *entry = PageId::TRASH;
            }
        }
    }

    /// Enters the checkpoints after this many positions. The sequence itself has no use for them any more.
    fn commit_states(&mut self, tables: &mut Tables, node: NodeId, after: usize) {
        let answers = after > tables.mark;
        for (index, states) in tables.states.iter_mut().enumerate() {
            let (group, pool) = (self.paged + index, &mut self.pools[self.paged + index]);
            let Some(&(_, page)) = states.saves.first().filter(|&&(saved, _)| saved == after) else {
                continue;
            };
            states.saves.remove(0);
            let own = self.tree.page(node, group).is_none();
            if own {
                self.tree.attach(node, group, page);
                pool.name(page, node);
                pool.note(page, self.kept);
            }
            pool.let_go(page);
            if !answers {
                continue;
            }
            // It may have been evicted since, and somebody else may go on from it.
            if let Some((node, page)) = states.newest.take()
                && self.tree.page(node, group) == Some(page)
                && pool.forget(page)
            {
                self.tree.detach(node, group);
            }
            let stays = after.is_multiple_of(self.every[index]);
            states.newest = Some((node, page)).filter(|_| own && !stays);
        }
    }

    /// Takes all pages back. Full pages that are in the tree stay findable until somebody needs the room.
    pub(crate) fn release(&mut self, tables: Tables) {
        for (pool, table) in self.pools.iter_mut().zip(&tables.groups) {
            // Tail first: the least recently used page is then a tail, and evicting it cuts no path.
            for &page in table.iter().rev().take_while(|&&page| page != PageId::TRASH) {
                pool.let_go(page);
            }
        }
        for (pool, states) in self.pools[self.paged..].iter_mut().zip(tables.states) {
            let saves = states.saves.into_iter().map(|(_, page)| page);
            states.found.into_iter().chain(states.own).chain(saves).for_each(|page| pool.let_go(page));
        }
        self.tree.let_go(tables.node);
    }

    /// Counts by group.
    pub(crate) fn counts(&self) -> Vec<PageCounts> {
        self.pools.iter().map(PagePool::counts).collect()
    }

    /// Who has which page, by group.
    pub(crate) fn uses(&self) -> Vec<Vec<PageUse>> {
        self.pools.iter().map(PagePool::uses).collect()
    }

    /// Checks every count against every other; for tests and for an idle engine.
    pub(crate) fn assert_consistent(&self) {
        for (group, pool) in self.pools.iter().enumerate() {
            pool.assert_consistent();
            for (page, state) in pool.pages.iter().enumerate() {
                if let Some(node) = state.node {
                    assert_eq!(self.tree.page(node, group), Some(page_id(page)), "page and node disagree");
                }
            }
        }
        self.tree.assert_consistent();
    }
}

/// The pages of one KV group.
struct PagePool {
    pages: Vec<PageState>,
    /// Never the trash page.
    free: Vec<PageId>,
    /// Unreferenced pages that the tree still names, least recently used first.
    idle: BTreeMap<u64, PageId>,
    /// Pages that were entered in the tree and are not copied yet, the newest last; some may be gone again.
    unkept: Vec<PageId>,
    /// Orders `idle`.
    tick: u64,
    window: Option<u32>,
}

#[derive(Clone, Debug, Default)]
struct PageState {
    /// Sequences that have it in their table.
    references: u32,
    /// Its node in the tree, if its content can be found there.
    node: Option<NodeId>,
    /// Its key in `idle` while it is there.
    idle_since: u64,
    /// Whether there is a copy of its content elsewhere.
    kept: bool,
}

impl PagePool {
    fn new(pages: usize, window: Option<u32>) -> Self {
        assert!(pages >= 2, "a pool has the trash page and at least one more");
        PagePool {
            pages: vec![PageState::default(); pages],
            free: (1..pages).rev().map(page_id).collect(),
            idle: BTreeMap::new(),
            unkept: Vec::new(),
            tick: 0,
            window,
        }
    }

    /// The first position that a query at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        match self.window {
            Some(window) => (position + 1).saturating_sub(window as usize),
            None => 0,
        }
    }

    fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// A page for one owner, and the node that loses it when it had to be evicted.
    fn take(&mut self) -> Option<(PageId, Option<NodeId>)> {
        let (page, evicted) = match self.free.pop() {
            Some(page) => (page, None),
            None => {
                let (_, page) = self.idle.pop_first()?;
                (page, self.state(page).node.take())
            }
        };
        let state = self.state(page);
        assert_eq!(state.references, 0, "a page handed out twice");
        state.references = 1;
        Some((page, evicted))
    }

    /// One more sequence refers to `page`.
    fn hold(&mut self, page: PageId) {
        let state = self.state(page);
        state.references += 1;
        if state.references == 1 {
            let since = state.idle_since;
            self.idle.remove(&since).expect("an unreferenced page of the tree is idle");
        }
    }

    /// One sequence less refers to `page`.
    fn let_go(&mut self, page: PageId) {
        self.tick += 1;
        let tick = self.tick;
        let state = self.state(page);
        state.references = state.references.checked_sub(1).expect("a page given back twice");
        if state.references > 0 {
            return;
        }
        state.idle_since = tick;
        if state.node.is_some() {
            self.idle.insert(tick, page);
        } else {
            self.free.push(page);
        }
    }

    /// Frees a page that the tree names, unless somebody refers to it; whether it did.
    fn forget(&mut self, page: PageId) -> bool {
        let PageState { references, idle_since, .. } = *self.state(page);
        if references > 0 {
            return false;
        }
        self.idle.remove(&idle_since).expect("an unreferenced page of the tree is idle");
        self.state(page).node = None;
        self.free.push(page);
        true
    }

    /// `page` can be found in the tree as `node` from now on.
    fn name(&mut self, page: PageId, node: NodeId) {
        let state = self.state(page);
        assert!(state.node.is_none() && state.references > 0, "only an owner enters its page, once");
        state.node = Some(node);
        state.kept = false;
    }

    /// Remembers that a page is to be copied when there is time, where copies are kept.
    fn note(&mut self, page: PageId, kept: bool) {
        if !kept {
            return;
        }
        if self.unkept.len() >= 2 * self.pages.len() {
            let pages = &self.pages;
            self.unkept.retain(|page| {
                let state = &pages[page.0 as usize];
                state.node.is_some() && !state.kept
            });
            self.unkept.sort_unstable();
            self.unkept.dedup();
        }
        self.unkept.push(page);
    }

    fn state(&mut self, page: PageId) -> &mut PageState {
        assert_ne!(page, PageId::TRASH, "the trash page has no owner");
        &mut self.pages[page.0 as usize]
    }

    fn counts(&self) -> PageCounts {
        let total = self.pages.len() - 1;
        PageCounts { total, referenced: total - self.available(), cached: self.idle.len() }
    }

    fn uses(&self) -> Vec<PageUse> {
        let of = |state: &PageState| match (state.references, state.node) {
            (0, None) => PageUse::Free,
            (0, Some(_)) => PageUse::Cached,
            (1, _) => PageUse::Held,
            _ => PageUse::Shared,
        };
        self.pages.iter().skip(1).take(PAGES_MAX).map(of).collect()
    }

    fn assert_consistent(&self) {
        let referenced = self.pages.iter().filter(|state| state.references > 0).count();
        assert_eq!(referenced, self.counts().referenced, "every page is free, idle or referenced");
        for page in self.idle.values() {
            let state = &self.pages[page.0 as usize];
            assert!(
                state.references == 0 && state.node.is_some(),
                "idle pages are unreferenced and findable"
            );
        }
    }
}

fn small(group: usize) -> u32 {
    u32::try_from(group).expect("few groups")
}

fn page_id(index: usize) -> PageId {
    PageId(u32::try_from(index).expect("page counts fit 32 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{ContentHash, Piece};

    fn pages(groups: &[(usize, Option<u32>)]) -> Pages {
        let group = |&(pages, window)| KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window, pages };
        Pages::new(&groups.iter().map(group).collect::<Vec<_>>())
    }

    fn text(tokens: &[u32]) -> Units<'_> {
        Units { tokens, pieces: &[] }
    }

    fn tokens(count: u32, first: u32) -> Vec<u32> {
        (first..first + count).collect()
    }

    /// Computes `tokens` for one sequence and gives its pages back.
    fn compute(pages: &mut Pages, salt: &str, tokens: &[u32]) {
        let (mut tables, _, _) = pages.find(None, salt, text(tokens));
        assert!(pages.grow(&mut tables, tokens.len()));
        pages.commit(&mut tables, text(tokens));
        pages.release(tables);
        pages.assert_consistent();
    }

    /// Tokens that a prompt finds.
    fn hit(pages: &mut Pages, salt: &str, tokens: &[u32]) -> usize {
        let (tables, hit, _) = pages.find(None, salt, text(tokens));
        pages.release(tables);
        pages.assert_consistent();
        hit
    }

    #[test]
    fn every_page_is_shown_with_who_has_it() {
        let mut pages = pages(&[(7, None)]);
        let prompt = tokens(70, 0);
        compute(&mut pages, "", &prompt);
        let (mut first, _, _) = pages.find(None, "", text(&prompt));
        assert!(pages.grow(&mut first, 70));
        let (second, _, _) = pages.find(None, "", text(&prompt[..40]));
        let count = |pages: &Pages, of| pages.uses()[0].iter().filter(|&&page| page == of).count();
        // Two full pages are the first's, one of them also the second's; a third has the first's tail.
        let counts =
            [PageUse::Free, PageUse::Cached, PageUse::Held, PageUse::Shared].map(|of| count(&pages, of));
        assert_eq!(counts, [3, 0, 2, 1]);
        pages.release(first);
        pages.release(second);
        let counts =
            [PageUse::Free, PageUse::Cached, PageUse::Held, PageUse::Shared].map(|of| count(&pages, of));
        assert_eq!(counts, [4, 2, 0, 0]);
    }

    /// Why a prompt does not find more.
    fn miss(pages: &mut Pages, salt: &str, tokens: &[u32]) -> Option<Miss> {
        let (tables, _, miss) = pages.find(None, salt, text(tokens));
        pages.release(tables);
        miss
    }

    #[test]
    fn a_miss_says_where_a_prompt_differs_from_the_nearest_one_of_its_own_tenant() {
        let mut pages = pages(&[(12, None)]);
        let prompt = tokens(100, 0);
        assert_eq!(miss(&mut pages, "", &prompt), Some(Miss::New));
        compute(&mut pages, "", &prompt);
        assert_eq!(miss(&mut pages, "", &prompt), None);
        assert_eq!(miss(&mut pages, "other", &prompt), Some(Miss::New), "it is another's");
        let differing = |at: usize| {
            let mut other = prompt.clone();
            other[at] = 7777;
            other
        };
        for at in [0, 31, 32, 70, 95] {
            assert_eq!(miss(&mut pages, "", &differing(at)), Some(Miss::Differs { at }));
        }
        assert_eq!(miss(&mut pages, "", &differing(97)), None, "what is no full page is computed anyway");
        compute(&mut pages, "", &differing(40));
        assert_eq!(
            miss(&mut pages, "", &differing(50)),
            Some(Miss::Differs { at: 50 }),
            "the nearest of two"
        );
        let longer: Vec<u32> = tokens(200, 0);
        assert_eq!(miss(&mut pages, "", &longer), Some(Miss::New), "the earlier one ended there");
    }

    #[test]
    fn a_miss_says_that_pages_were_evicted_and_how_much_was_known() {
        let mut pages = pages(&[(5, None)]);
        let (old, young) = (tokens(128, 0), tokens(128, 5000));
        compute(&mut pages, "", &old);
        assert_eq!(miss(&mut pages, "", &[&old[..], &[1]].concat()), None);
        compute(&mut pages, "", &young);
        let longer = [&old[..], &tokens(40, 9000)].concat();
        assert_eq!(miss(&mut pages, "", &longer), Some(Miss::Evicted { known: 128 }));
        assert_eq!(miss(&mut pages, "", &old[..70]), Some(Miss::Evicted { known: 64 }));
        assert_eq!(miss(&mut pages, "other", &longer), Some(Miss::New), "another's evictions are not told");
    }

    #[test]
    fn full_pages_are_found_and_a_token_is_always_left_to_compute() {
        let mut pages = pages(&[(10, None)]);
        let prompt = tokens(100, 0);
        compute(&mut pages, "", &prompt);
        assert_eq!(hit(&mut pages, "", &prompt), 96);
        assert_eq!(hit(&mut pages, "", &prompt[..97]), 96);
        assert_eq!(hit(&mut pages, "", &prompt[..96]), 64, "the last token's logits are wanted");
        assert_eq!(hit(&mut pages, "other", &prompt), 0, "a salt keeps tenants apart");
        let mut other = prompt.clone();
        other[40] = 7;
        assert_eq!(hit(&mut pages, "", &other), 32);
    }

    #[test]
    fn the_least_recently_used_page_is_evicted_and_never_a_referenced_one() {
        let mut pages = pages(&[(5, None)]);
        let (old, young) = (tokens(64, 0), tokens(64, 1000));
        compute(&mut pages, "", &old);
        compute(&mut pages, "", &young);
        let longer = |prefix: &[u32]| [prefix, &[5]].concat();
        assert_eq!(hit(&mut pages, "", &longer(&old)), 64);
        // `young` is now the least recently used: a new page takes its tail first.
        let (held, found, _) = pages.find(None, "", text(&longer(&old)));
        assert_eq!(found, 64);
        compute(&mut pages, "", &tokens(32, 5000));
        assert_eq!(hit(&mut pages, "", &longer(&young)), 32);
        let (mut wide, _, _) = pages.find(None, "", text(&tokens(96, 9000)));
        assert!(!pages.grow(&mut wide, 96), "two of four pages are referenced");
        assert!(pages.grow(&mut wide, 64));
        assert_eq!(pages.counts()[0], PageCounts { total: 4, referenced: 4, cached: 0 });
        pages.release(wide);
        pages.release(held);
        assert_eq!(hit(&mut pages, "", &longer(&old)), 64);
    }

    #[test]
    fn a_hit_is_the_longest_length_valid_in_every_group() {
        // The windowed group keeps what the next position sees; the rest of its pages go as the sequence moves on.
        let mut pages = pages(&[(20, None), (20, Some(40))]);
        let prompt = tokens(200, 0);
        let (mut tables, _, _) = pages.find(None, "", text(&prompt));
        assert!(pages.grow(&mut tables, 200));
        pages.commit(&mut tables, text(&prompt));
        assert_eq!(tables.groups[1].iter().filter(|&&page| page != PageId::TRASH).count(), 2);
        pages.release(tables);
        assert_eq!(hit(&mut pages, "", &prompt), 192);
        assert_eq!(hit(&mut pages, "", &prompt[..97]), 96, "dropped pages stay findable until evicted");
        assert_eq!(pages.counts()[1].referenced, 0);
    }

    /// Keys and values, and states with a checkpoint every 64 tokens.
    fn with_states(states: usize) -> Pages {
        let state = KvKind::State { bytes: 1, every: 64 };
        Pages::new(&[
            KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 20 },
            KvGroup { layers: 1, kind: state, window: None, pages: states },
        ])
    }

    #[test]
    fn a_state_is_gone_on_from_where_a_checkpoint_is_and_nowhere_else() {
        let mut pages = with_states(8);
        let prompt = tokens(170, 0);
        let (mut first, _, _) = pages.find(None, "", text(&prompt));
        assert!(pages.grow(&mut first, 100));
        let row = first.states(0, 100).remove(0);
        assert_eq!((row.from, row.saves.len(), row.saves[0].0), (None, 1, 64));
        pages.commit(&mut first, text(&prompt[..100]));
        assert!(pages.grow(&mut first, 170));
        let next = first.states(100, 170).remove(0);
        assert_eq!((next.from, next.to), (Some(row.to), row.to));
        let after: Vec<u32> = next.saves.iter().map(|&(after, _)| after).collect();
        assert_eq!(after, [128, 160], "every 64 tokens, and at the prompt's last full page");
        pages.commit(&mut first, text(&prompt));
        assert_eq!(pages.counts()[1], PageCounts { total: 7, referenced: 1, cached: 3 });
        for (asked, wanted) in [(170, 160), (160, 128), (129, 128), (128, 64), (64, 0)] {
            assert_eq!(hit(&mut pages, "", &prompt[..asked]), wanted, "{asked} tokens");
        }
        let (mut second, found, _) = pages.find(None, "", text(&prompt[..140]));
        assert_eq!(found, 128);
        assert!(pages.grow(&mut second, 140));
        let again = second.states(128, 140).remove(0);
        assert_eq!(again.from, Some(next.saves[0].1), "the checkpoint after 128");
        assert_ne!(again.to, row.to, "its own state");
        assert_eq!(second.states(140, 141)[0].from, Some(again.to));
        assert_eq!(pages.counts()[1].referenced, 3, "two sequences and the checkpoint being read");
        pages.commit(&mut second, text(&prompt[..140]));
        assert_eq!(pages.counts()[1].referenced, 2);
        pages.release(first);
        pages.release(second);
        pages.assert_consistent();
        assert_eq!(pages.counts()[1], PageCounts { total: 7, referenced: 0, cached: 3 });
    }

    #[test]
    fn of_an_answer_the_newest_checkpoint_stays_for_the_next_turn() {
        let mut pages = with_states(12);
        let all = tokens(300, 0);
        let (mut turn, _, _) = pages.find(None, "", text(&all[..40]));
        assert!(pages.grow(&mut turn, 40));
        pages.commit(&mut turn, text(&all[..40]));
        // The answer, token by token: ends of pages at 64, 96, ... 224, every second of which stays anyway.
        for end in 41..=240 {
            assert!(pages.grow(&mut turn, end));
            pages.commit(&mut turn, text(&all[..end]));
            pages.assert_consistent();
        }
        pages.release(turn);
        // At 32 (the prompt's), 64, 128, 192, and at the last page's end.
        assert_eq!(pages.counts()[1], PageCounts { total: 11, referenced: 0, cached: 5 });
        for (asked, wanted) in [(241, 224), (220, 192), (190, 128), (97, 64), (60, 32)] {
            assert_eq!(hit(&mut pages, "", &all[..asked]), wanted, "{asked} tokens");
        }
    }

    #[test]
    fn a_checkpoint_of_an_answer_stays_while_somebody_goes_on_from_it() {
        let mut pages = with_states(12);
        let all = tokens(120, 0);
        let (mut turn, _, _) = pages.find(None, "", text(&all[..40]));
        for end in [40, 96] {
            assert!(pages.grow(&mut turn, end));
            pages.commit(&mut turn, text(&all[..end]));
        }
        let (mut other, found, _) = pages.find(None, "", text(&all[..100]));
        assert_eq!(found, 96);
        assert!(pages.grow(&mut other, 100) && pages.grow(&mut turn, 160));
        let long: Vec<u32> = tokens(160, 0);
        pages.commit(&mut turn, text(&long));
        let row = other.states(96, 100).remove(0);
        assert!(row.from.is_some_and(|from| Some(from) != Some(row.to)), "it reads the checkpoint");
        pages.commit(&mut other, text(&all[..100]));
        pages.release(other);
        pages.release(turn);
        pages.assert_consistent();
        assert_eq!(hit(&mut pages, "", &all[..100]), 96, "it was not taken away under the other's feet");
    }

    #[test]
    fn a_checkpoint_without_room_is_left_out_and_a_state_without_room_waits() {
        let mut pages = with_states(3);
        let (one, other) = (tokens(64, 0), tokens(64, 1000));
        let (mut first, _, _) = pages.find(None, "", text(&one));
        let (mut second, _, _) = pages.find(None, "", text(&other));
        assert!(pages.grow(&mut first, 10) && pages.grow(&mut second, 10));
        assert!(pages.grow(&mut first, 64));
        assert_eq!(first.states(10, 64)[0].saves, []);
        pages.commit(&mut first, text(&one));
        let (mut third, _, _) = pages.find(None, "", text(&tokens(64, 2000)));
        assert!(!pages.grow(&mut third, 10), "both states are somebody's");
        pages.release(second);
        assert!(pages.grow(&mut third, 10));
        pages.release(first);
        pages.release(third);
        assert_eq!(hit(&mut pages, "", &[&one[..], &[1]].concat()), 0, "no checkpoint, no hit");
    }

    #[test]
    fn images_with_the_same_placeholders_never_share_a_page() {
        let mut pages = pages(&[(20, None)]);
        let prompt = vec![7; 100];
        let image = |hash| {
            let (hash, rows) = (ContentHash([hash; 16]), vec![0.0; 30].into());
            [Piece { at: 40, hash, columns: 1, rows, offsets: Vec::new(), whole: false }]
        };
        let (cat, dog) = (image(1), image(2));
        let units = |pieces| Units { tokens: &prompt, pieces };
        let (mut tables, _, _) = pages.find(None, "", units(&cat));
        assert!(pages.grow(&mut tables, 100));
        pages.commit(&mut tables, units(&cat));
        pages.release(tables);
        for (pieces, wanted) in [(&cat[..], 96), (&dog[..], 32), (&[], 32)] {
            let (tables, hit, _) = pages.find(None, "", units(pieces));
            assert_eq!(hit, wanted);
            pages.release(tables);
        }
        let moved = [Piece { at: 41, ..cat[0].clone() }];
        let (tables, hit, _) = pages.find(None, "", units(&moved));
        assert_eq!(hit, 32, "the same content elsewhere is another prefix");
        pages.release(tables);
    }
}
