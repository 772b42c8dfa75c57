//! Who owns which page: one pool per KV group, and the prefix tree that lets sequences share full pages.

use std::collections::BTreeMap;

use fornax_compute::{KvGroup, PAGE_TOKENS, PageId};

use crate::picture::{PAGES_MAX, PageUse};
use crate::prefix::{NodeId, PrefixTree};

/// A sequence's pages: one table per KV group, and how far its tokens are in the prefix tree.
///
/// A table belongs to exactly one sequence and must be given back through [`Pages::release`].
#[derive(Debug)]
pub(crate) struct Tables {
    /// By group; entry `p` holds positions `p * PAGE_TOKENS ..`. Entries below a window are the trash page.
    groups: Vec<Vec<PageId>>,
    /// The node of the last page entered in the tree, held by a reference.
    node: NodeId,
    /// Leading pages already entered in the tree.
    entered: usize,
}

impl Tables {
    /// The page tables as a batch row carries them, until [`Tables::take_back`].
    pub(crate) fn lend(&mut self) -> Vec<Vec<PageId>> {
        assert!(!self.groups.is_empty(), "lent once");
        std::mem::take(&mut self.groups)
    }

    /// What was lent.
    pub(crate) fn take_back(&mut self, groups: Vec<Vec<PageId>>) {
        assert!(self.groups.is_empty(), "nothing was lent");
        self.groups = groups;
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
    pools: Vec<PagePool>,
    tree: PrefixTree,
}

impl Pages {
    pub(crate) fn new(groups: &[KvGroup]) -> Self {
        assert!(!groups.is_empty(), "a model has at least one KV group");
        Pages {
            pools: groups.iter().map(|group| PagePool::new(group.pages, group.window)).collect(),
            tree: PrefixTree::new(groups.len()),
        }
    }

    /// Tables for a new or resumed sequence, holding the longest run of leading pages that every group still has;
    /// with it, how many tokens that is. At least one token is left to compute, since its logits are wanted.
    pub(crate) fn find(&mut self, adapter: Option<u32>, salt: &str, tokens: &[u32]) -> (Tables, usize) {
        let pages_max = tokens.len().saturating_sub(1) / PAGE_TOKENS;
        let root = self.tree.root(adapter, salt);
        let mut path = Vec::new();
        let mut node = root;
        for page in tokens.chunks_exact(PAGE_TOKENS).take(pages_max) {
            let Some(child) = self.tree.child(node, page) else { break };
            path.push(child);
            node = child;
        }
        let hit = self.valid_in_every_group(&path);
        let mut groups = Vec::with_capacity(self.pools.len());
        for (index, pool) in self.pools.iter_mut().enumerate() {
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
        (Tables { groups, node, entered: hit }, hit * PAGE_TOKENS)
    }

    /// Leading pages of `path` from which a sequence can go on in every group: a full group needs them all, a
    /// windowed group those that the next position still sees.
    fn valid_in_every_group(&self, path: &[NodeId]) -> usize {
        (1..=path.len())
            .rev()
            .find(|&pages| {
                self.pools.iter().enumerate().all(|(group, pool)| {
                    let first = pool.first_seen(pages * PAGE_TOKENS) / PAGE_TOKENS;
                    path[first.min(pages)..pages].iter().all(|&node| self.tree.page(node, group).is_some())
                })
            })
            .unwrap_or(0)
    }

    /// Makes the tables cover `positions`. All groups or none: `false` leaves everything as it was.
    pub(crate) fn grow(&mut self, tables: &mut Tables, positions: usize) -> bool {
        let pages = positions.div_ceil(PAGE_TOKENS);
        let fits = self
            .pools
            .iter()
            .zip(&tables.groups)
            .all(|(pool, table)| pages.saturating_sub(table.len()) <= pool.available());
        if !fits {
            return false;
        }
        for (group, (pool, table)) in self.pools.iter_mut().zip(&mut tables.groups).enumerate() {
            while table.len() < pages {
                let (page, evicted) = pool.take().expect("counted above");
                if let Some(node) = evicted {
                    self.tree.detach(node, group);
                }
                table.push(page);
            }
        }
        true
    }

    /// Called when the keys and values of `tokens` have been computed and collected: enters the full pages in the
    /// prefix tree, and gives back pages that no later position of a windowed group can see.
    pub(crate) fn commit(&mut self, tables: &mut Tables, tokens: &[u32]) {
        for (index, page) in tokens.chunks_exact(PAGE_TOKENS).enumerate().skip(tables.entered) {
            let child = self.tree.enter(tables.node, page);
            self.tree.hold(child);
            self.tree.let_go(tables.node);
            tables.node = child;
            tables.entered = index + 1;
            for (group, (pool, table)) in self.pools.iter_mut().zip(&tables.groups).enumerate() {
                let page = table[index];
                if page != PageId::TRASH && self.tree.page(child, group).is_none() {
                    self.tree.attach(child, group, page);
                    pool.name(page, child);
                }
            }
        }
        for (pool, table) in self.pools.iter_mut().zip(&mut tables.groups) {
            let first = pool.first_seen(tokens.len()) / PAGE_TOKENS;
            for entry in table.iter_mut().take(first).rev() {
                if *entry == PageId::TRASH {
                    break;
                }
                pool.let_go(*entry);
                *entry = PageId::TRASH;
            }
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
}

impl PagePool {
    fn new(pages: usize, window: Option<u32>) -> Self {
        assert!(pages >= 2, "a pool has the trash page and at least one more");
        PagePool {
            pages: vec![PageState::default(); pages],
            free: (1..pages).rev().map(page_id).collect(),
            idle: BTreeMap::new(),
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

    /// `page` can be found in the tree as `node` from now on.
    fn name(&mut self, page: PageId, node: NodeId) {
        let state = self.state(page);
        assert!(state.node.is_none() && state.references > 0, "only an owner enters its page, once");
        state.node = Some(node);
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

fn page_id(index: usize) -> PageId {
    PageId(u32::try_from(index).expect("page counts fit 32 bits"))
}

#[cfg(test)]
mod tests {
    use fornax_compute::KvKind;

    use super::*;

    fn pages(groups: &[(usize, Option<u32>)]) -> Pages {
        let group = |&(pages, window)| KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window, pages };
        Pages::new(&groups.iter().map(group).collect::<Vec<_>>())
    }

    fn tokens(count: u32, first: u32) -> Vec<u32> {
        (first..first + count).collect()
    }

    /// Computes `tokens` for one sequence and gives its pages back.
    fn compute(pages: &mut Pages, salt: &str, tokens: &[u32]) {
        let (mut tables, _) = pages.find(None, salt, tokens);
        assert!(pages.grow(&mut tables, tokens.len()));
        pages.commit(&mut tables, tokens);
        pages.release(tables);
        pages.assert_consistent();
    }

    /// Tokens that a prompt finds.
    fn hit(pages: &mut Pages, salt: &str, tokens: &[u32]) -> usize {
        let (tables, hit) = pages.find(None, salt, tokens);
        pages.release(tables);
        pages.assert_consistent();
        hit
    }

    #[test]
    fn every_page_is_shown_with_who_has_it() {
        let mut pages = pages(&[(7, None)]);
        let prompt = tokens(70, 0);
        compute(&mut pages, "", &prompt);
        let (mut first, _) = pages.find(None, "", &prompt);
        assert!(pages.grow(&mut first, 70));
        let (second, _) = pages.find(None, "", &prompt[..40]);
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
        let (held, found) = pages.find(None, "", &longer(&old));
        assert_eq!(found, 64);
        compute(&mut pages, "", &tokens(32, 5000));
        assert_eq!(hit(&mut pages, "", &longer(&young)), 32);
        let (mut wide, _) = pages.find(None, "", &tokens(96, 9000));
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
        let (mut tables, _) = pages.find(None, "", &prompt);
        assert!(pages.grow(&mut tables, 200));
        pages.commit(&mut tables, &prompt);
        assert_eq!(tables.groups[1].iter().filter(|&&page| page != PageId::TRASH).count(), 2);
        pages.release(tables);
        assert_eq!(hit(&mut pages, "", &prompt), 192);
        assert_eq!(hit(&mut pages, "", &prompt[..97]), 96, "dropped pages stay findable until evicted");
        assert_eq!(pages.counts()[1].referenced, 0);
    }
}
