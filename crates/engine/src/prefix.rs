//! The tree of known prefixes: what was read is kept in which pages.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::{BuildHasher, RandomState},
};

use fornax_compute::{PAGE_TOKENS, PageId};

use crate::request::{ContentHash, Piece};
use crate::tier::PathName;

/// What was read at a position. Two images have the same placeholder tokens: what is kept of them is told apart by what
/// they are, never by those.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unit {
    /// A token of text.
    Token(u32),
    /// A row of given content.
    Given {
        /// Of the whole content.
        hash: ContentHash,
        /// Which of its rows.
        index: u32,
    },
}

/// What a sequence reads, from its first position on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Units<'a> {
    /// One for each position; placeholders where content is given.
    pub(crate) tokens: &'a [u32],
    /// In the order of their positions; some may be beyond `tokens`.
    pub(crate) pieces: &'a [Piece],
}

impl Units<'_> {
    /// Positions.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Full pages.
    pub(crate) fn pages(&self) -> usize {
        self.len() / PAGE_TOKENS
    }

    /// A full page.
    pub(crate) fn page(&self, page: usize) -> [Unit; PAGE_TOKENS] {
        let first = page * PAGE_TOKENS;
        let mut units = [Unit::Token(0); PAGE_TOKENS];
        for (unit, &token) in units.iter_mut().zip(&self.tokens[first..first + PAGE_TOKENS]) {
            *unit = Unit::Token(token);
        }
        for piece in self.pieces {
            let positions = piece.positions();
            for position in positions.start.max(first)..positions.end.min(first + PAGE_TOKENS) {
                let index = u32::try_from(position - positions.start).expect("bounded by the context");
                units[position - first] = Unit::Given { hash: piece.hash, index };
            }
        }
        units
    }
}

/// A node's place in the tree's storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(u32);

/// One full page after a given prefix. A path from a root spells a prefix; a root is an adapter and a salt, so
/// that tenants with different salts never meet, nor keys and values of different adapters.
#[derive(Debug)]
struct Node {
    parent: Option<NodeId>,
    /// Those who name it as their parent, in no order.
    children: Vec<NodeId>,
    /// A hash of the whole path, by which it is remembered when it is gone.
    path: u64,
    /// The path's name beyond this process, where copies of its pages may be kept.
    name: Option<PathName>,
    content: Content,
    /// Children, pages and sequences that rely on this node; it goes with the last of them.
    references: u32,
    /// By group: the page that keeps this node's keys and values.
    pages: Vec<Option<PageId>>,
}

#[derive(Debug, PartialEq, Eq)]
enum Content {
    Root(Option<u32>, Box<str>),
    Units(Box<[Unit]>),
}

/// Finds nodes by hash and trusts only the comparison that follows.
pub(crate) struct PrefixTree<S = RandomState> {
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    /// (parent, hash of the content) to the nodes with that hash: almost always one.
    index: HashMap<(Option<NodeId>, u64), Vec<NodeId>>,
    groups: usize,
    /// Whether paths have names beyond this process.
    named: bool,
    hasher: S,
    forgotten: Forgotten,
}

/// Paths whose pages were evicted, the newest of them: enough to say of a prompt that it was known once.
#[derive(Default)]
struct Forgotten {
    known: HashSet<u64>,
    order: VecDeque<u64>,
}

/// Paths that are remembered: 32 tokens each, and a megabyte or two in all.
const FORGOTTEN_MAX: usize = 1 << 16;

/// Siblings that are compared with a prompt, the newest: those of a root may be thousands.
const COMPARED_MAX: usize = 256;

impl Forgotten {
    fn add(&mut self, path: u64) {
        if self.known.insert(path) {
            self.order.push_back(path);
        }
        if self.order.len() > FORGOTTEN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }
}

impl PrefixTree {
    pub(crate) fn new(groups: usize) -> Self {
        Self::with_hasher(groups, RandomState::new())
    }
}

impl<S: BuildHasher> PrefixTree<S> {
    fn with_hasher(groups: usize, hasher: S) -> Self {
        let (nodes, vacant, index) = (Vec::new(), Vec::new(), HashMap::new());
        let forgotten = Forgotten::default();
        PrefixTree { nodes, vacant, index, groups, named: false, hasher, forgotten }
    }

    /// Gives names to paths from now on.
    pub(crate) fn name_paths(&mut self) {
        self.named = true;
    }

    /// The name of what is read up to the end of `node`. There is none of what an adapter made: numbers of adapters are
    /// given anew in each process.
    pub(crate) fn name(&self, node: NodeId) -> Option<PathName> {
        self.node(node).name
    }

    /// The root of an adapter and a salt, made if it is new. Unless held it may go with its last child.
    pub(crate) fn root(&mut self, adapter: Option<u32>, salt: &str) -> NodeId {
        let hash = self.hasher.hash_one((adapter, salt));
        let same =
            |content: &Content| matches!(content, Content::Root(of, own) if *of == adapter && **own == *salt);
        let found = self.lookup(None, hash, same);
        found.unwrap_or_else(|| self.insert(None, hash, Content::Root(adapter, salt.into())))
    }

    /// The child of `parent` that is exactly these units.
    pub(crate) fn child(&self, parent: NodeId, units: &[Unit]) -> Option<NodeId> {
        self.hashed_child(parent, self.hasher.hash_one(units), units)
    }

    fn hashed_child(&self, parent: NodeId, hash: u64, units: &[Unit]) -> Option<NodeId> {
        self.lookup(Some(parent), hash, |content| matches!(content, Content::Units(own) if **own == *units))
    }

    /// The child of `parent` that is exactly these units, made if it is new.
    pub(crate) fn enter(&mut self, parent: NodeId, units: &[Unit]) -> NodeId {
        let hash = self.hasher.hash_one(units);
        self.hashed_child(parent, hash, units).unwrap_or_else(|| {
            self.hold(parent);
            self.insert(Some(parent), hash, Content::Units(units.into()))
        })
    }

    /// Of the children of `parent`, how much of the likest one begins as these units; `None` without children.
    pub(crate) fn likest(&self, parent: NodeId, units: &[Unit]) -> Option<usize> {
        let newest = self.node(parent).children.iter().rev().take(COMPARED_MAX);
        let same = |child: &NodeId| match &self.node(*child).content {
            Content::Units(own) => own.iter().zip(units).take_while(|(own, unit)| own == unit).count(),
            Content::Root(..) => 0,
        };
        newest.map(same).max()
    }

    /// How many of the pages that follow `parent` were known once and evicted.
    pub(crate) fn forgotten(
        &self,
        parent: NodeId,
        pages: impl Iterator<Item = [Unit; PAGE_TOKENS]>,
    ) -> usize {
        if self.forgotten.known.is_empty() {
            return 0;
        }
        let mut path = self.node(parent).path;
        let known = |units: &[Unit; PAGE_TOKENS]| {
            path = self.hasher.hash_one((path, self.hasher.hash_one(&units[..])));
            self.forgotten.known.contains(&path)
        };
        pages.take_while(known).count()
    }

    /// The page of `node` in `group`.
    pub(crate) fn page(&self, node: NodeId, group: usize) -> Option<PageId> {
        self.node(node).pages[group]
    }

    /// `page` keeps `node` in `group` from now on.
    pub(crate) fn attach(&mut self, node: NodeId, group: usize, page: PageId) {
        self.hold(node);
        let old = self.node_mut(node).pages[group].replace(page);
        assert!(old.is_none(), "a node has one page per group");
    }

    /// The page of `node` in `group` was evicted.
    pub(crate) fn detach(&mut self, node: NodeId, group: usize) {
        self.node_mut(node).pages[group].take().expect("only an attached page is evicted");
        let path = self.node(node).path;
        self.forgotten.add(path);
        self.let_go(node);
    }

    /// One more reason to keep `node`.
    pub(crate) fn hold(&mut self, node: NodeId) {
        self.node_mut(node).references += 1;
    }

    /// One reason less; nodes that nothing relies on go, up to the root.
    pub(crate) fn let_go(&mut self, node: NodeId) {
        let mut next = Some(node);
        while let Some(id) = next {
            let node = self.node_mut(id);
            node.references = node.references.checked_sub(1).expect("a node let go once too often");
            if node.references > 0 {
                return;
            }
            let node = self.nodes[id.0 as usize].take().expect("just used");
            let hash = match &node.content {
                Content::Root(adapter, salt) => self.hasher.hash_one((*adapter, &**salt)),
                Content::Units(units) => self.hasher.hash_one(&**units),
            };
            let key = (node.parent, hash);
            let same = self.index.get_mut(&key).expect("every node is indexed");
            same.retain(|&other| other != id);
            if same.is_empty() {
                self.index.remove(&key);
            }
            self.vacant.push(id);
            if let Some(parent) = node.parent {
                // In order: the newest are compared first.
                self.node_mut(parent).children.retain(|&child| child != id);
            }
            next = node.parent;
        }
    }

    /// Nodes that exist.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    pub(crate) fn assert_consistent(&self) {
        let mut owed: HashMap<NodeId, u32> = HashMap::new();
        for node in self.nodes.iter().flatten() {
            if let Some(parent) = node.parent {
                *owed.entry(parent).or_default() += 1;
            }
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            let pages = node.pages.iter().flatten().count();
            let children = owed.get(&NodeId(u32::try_from(index).expect("bounded"))).copied().unwrap_or(0);
            assert!(node.references as usize >= pages + children as usize, "a node lost a reference");
        }
    }

    fn lookup(&self, parent: Option<NodeId>, hash: u64, same: impl Fn(&Content) -> bool) -> Option<NodeId> {
        let candidates = self.index.get(&(parent, hash))?;
        candidates.iter().copied().find(|&id| same(&self.node(id).content))
    }

    fn insert(&mut self, parent: Option<NodeId>, hash: u64, content: Content) -> NodeId {
        let path = match parent {
            Some(parent) => self.hasher.hash_one((self.node(parent).path, hash)),
            None => hash,
        };
        let name = self.named.then(|| self.named_as(parent, &content)).flatten();
        let pages = vec![None; self.groups];
        let node = Node { parent, children: Vec::new(), path, name, content, references: 0, pages };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.nodes[id.0 as usize] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                NodeId(u32::try_from(self.nodes.len() - 1).expect("nodes are bounded by pages and sequences"))
            }
        };
        self.index.entry((parent, hash)).or_default().push(id);
        if let Some(parent) = parent {
            self.node_mut(parent).children.push(id);
        }
        id
    }

    fn named_as(&self, parent: Option<NodeId>, content: &Content) -> Option<PathName> {
        match content {
            Content::Root(Some(_), _) => None,
            Content::Root(None, salt) => Some(PathName::root(salt)),
            Content::Units(units) => Some(self.node(parent?).name?.and(units)),
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.0 as usize].as_ref().expect("a held node exists")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.0 as usize].as_mut().expect("a held node exists")
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, Hasher};

    use super::*;

    /// Every content has the same hash.
    #[derive(Default)]
    struct Blind;

    impl Hasher for Blind {
        fn finish(&self) -> u64 {
            7
        }

        fn write(&mut self, _: &[u8]) {}
    }

    #[test]
    fn what_was_read_decides_even_when_all_hashes_collide() {
        let mut tree = PrefixTree::with_hasher(1, BuildHasherDefault::<Blind>::default());
        let (a, b) = (tree.root(None, "a"), tree.root(None, "b"));
        assert_ne!(a, b, "salts keep tenants apart");
        tree.hold(a);
        let one = tree.enter(a, &[1, 2].map(Unit::Token));
        let two = tree.enter(a, &[1, 3].map(Unit::Token));
        assert_ne!(one, two);
        assert_eq!(tree.enter(a, &[1, 2].map(Unit::Token)), one);
        assert_eq!(tree.child(a, &[1, 3].map(Unit::Token)), Some(two));
        assert_eq!(tree.child(b, &[1, 3].map(Unit::Token)), None);
        assert_eq!(
            tree.child(one, &[1, 3].map(Unit::Token)),
            None,
            "the same page after another prefix is another node"
        );
        let given = |hash: u8, index| [Unit::Token(1), Unit::Given { hash: ContentHash([hash; 16]), index }];
        let image = tree.enter(a, &given(1, 0));
        assert_ne!(image, one, "given content is no token");
        assert_eq!(tree.child(a, &given(1, 0)), Some(image));
        assert_eq!((tree.child(a, &given(2, 0)), tree.child(a, &given(1, 1))), (None, None));
    }

    #[test]
    fn a_node_goes_with_its_last_reason_and_takes_its_ancestors() {
        let mut tree = PrefixTree::new(1);
        let root = tree.root(None, "");
        tree.hold(root);
        let child = tree.enter(root, &[1].map(Unit::Token));
        let grandchild = tree.enter(child, &[2].map(Unit::Token));
        tree.attach(grandchild, 0, PageId(9));
        tree.let_go(root);
        assert_eq!(tree.len(), 3, "a page deep in the tree keeps its path");
        tree.assert_consistent();
        tree.detach(grandchild, 0);
        assert_eq!(tree.len(), 0);
    }
}
